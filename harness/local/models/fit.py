"""Decides which layers go to which device: `fit`, from a case to a placement of each model.

Ways to place all models are tried in turn, the best first (`_attempts`); the first one with enough
room is taken. Within an attempt the models are placed one after the other, each in the room that
those before it have left. Two GPUs with room for 24 GB each, a target of 30 GB, a draft of 14 GB:

1. GPU 0 alone has no room for the target, nor would it have if the draft came first.
2. Both GPUs hold the target, 15 GB each; no GPU then has 14 GB left for a whole draft.
3. The draft comes first, on GPU 0. The target gets 10 GB there and 20 GB on GPU 1: it fits.
4. (Not needed any more: layers of the target outside the GPUs, where that is allowed.)
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.config.amounts import amount
from harness.config.errors import SettingError
from harness.local.models.case import Case, Memory, Misfit, Placement, parse_device
from harness.local.models.sketch import Device, DeviceMap, Sketch, device_name, offloads


def fit(case: Case) -> list[Placement]:
    """Place the target, and the draft on the remaining memory.

    `auto` takes the fewest GPUs that hold both and spreads the target evenly over the fewest of
    these, and `balanced` spreads it evenly over all. A draft stays whole on the GPU with the most
    room.

    Raises:
        Misfit: there is no room for a model.
        SettingError: an explicit map that does not suit model or machine, or a model that cannot
            be split or offloaded.
    """
    for attempt in _attempts(case):
        order = -1 if attempt.draft_first else 1
        placements = []
        room = case.room
        spread = case.spread if len(attempt.gpus) > 1 else case
        try:
            for sketch in spread.models[::order]:
                placement = _place(spread, attempt, sketch, room)
                # The next model has what this one leaves.
                room = {
                    device: max(0, size - placement.taken(device)) for device, size in room.items()
                }
                placements.append(placement)
            return placements[::order]
        except Misfit as exception:
            if not attempt.draft_first:
                misfit = exception
    raise misfit


# Attempts -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Attempt:
    """One way to place all models.

    Attributes:
        gpus: allowed for models whose own settings say nothing about GPUs.
        draft_first: whether the draft chooses its GPU before the target.
        offload: whether the target's last layers may be outside the GPUs.
    """

    gpus: Sequence[int]
    draft_first: bool = False
    offload: bool = False


def _attempts(case: Case) -> Iterator[_Attempt]:
    """All ways to place the models, the best first."""
    target = case.models[0]
    gpus = case.gpus[: case.placement.gpus]
    choices = [gpus]
    if gpus and case.strategy == "auto" and not target.settings.gpus:
        choices = _fewest_first(gpus, case.free)
    # A whole draft may need a GPU that the target would have shared evenly.
    may_be_first = len(case.models) > 1 and case.placement.device_map is None
    for choice in choices:
        yield _Attempt(choice)
        if may_be_first:
            yield _Attempt(choice, draft_first=True)
    if case.placement.offload != "none":
        yield _Attempt(gpus, draft_first=may_be_first, offload=True)


# One model ----------------------------------------------------------------------------------------


def _place(case: Case, attempt: _Attempt, sketch: Sketch, room: Memory) -> Placement:
    """Place a model on the first choice of devices that holds it, with the least offloaded."""
    device_map = case.placement.device_map
    if device_map is not None and sketch.role == "model":
        return _place_explicitly(case, sketch, device_map)
    choices = _device_choices(case, attempt, sketch, room)
    # Weights that are quantized already cannot be outside the GPUs.
    may_offload = attempt.offload and sketch.role == "model" and sketch.stored is None
    most_offloaded = len(sketch.blocks) - 1 if may_offload else 0
    for num_offloaded in range(most_offloaded + 1):
        for devices in choices:
            placement = _share_out(case, sketch, room, devices, num_offloaded)
            if placement is not None:
                return placement
    raise case.misfit(sketch, {device: room[device] for device in choices[-1]})


def _device_choices(
    case: Case, attempt: _Attempt, sketch: Sketch, room: Memory
) -> Sequence[Sequence[Device]]:
    """Lists of devices to try in turn for a model; its layers go to those of a list in order."""
    count = sketch.settings.gpus
    gpus = case.gpus_for(sketch)
    if not count:
        gpus = [gpu for gpu in gpus if gpu in attempt.gpus]
    if not gpus:
        return [["cpu"]]
    if sketch.role == "draft" or len(sketch.blocks) == 1:
        return [roomiest(gpus, room, 1)]
    if count:
        return [roomiest(gpus, room, count)]
    if case.strategy == "auto":
        return _fewest_first(gpus, room)
    return [gpus]


def _share_out(
    case: Case, sketch: Sketch, room: Memory, devices: Sequence[Device], num_offloaded: int
) -> Placement | None:
    """Put a model's blocks on devices in order, the last ones outside; None if there is no room.

    The first device computes the blocks that are outside, one at a time: it holds their caches, and
    keeps enough room for the largest of them.
    """
    outside = case.placement.offload
    if num_offloaded and outside in devices:
        return None
    num_here = len(sketch.blocks) - num_offloaded
    on_gpu = devices[0] != "cpu"
    needs = case.needs(sketch, whole=len(devices) == 1 and not num_offloaded, on_gpu=on_gpu)
    caches = sketch.block_caches(needs.tokens, needs.states)
    # With blocks outside, only those on GPUs are quantized; those in main memory beside a disk are
    # not (`Sketch.weights_on`).
    weights = sketch.unquantized_bytes if num_offloaded and not on_gpu else sketch.block_bytes
    loads = [weights[block] + caches[block] for block in range(num_here)]
    loads[-1] += needs.graph_bytes
    rooms = [room[device] for device in devices]
    rooms[0] -= max(sketch.unquantized_bytes[num_here:], default=0) + sum(caches[num_here:])
    places = filled(loads, rooms) if num_offloaded else balanced(loads, rooms)
    if not places:
        return None
    block_devices = [devices[place] for place in places] + [outside] * num_offloaded
    placement = _placement(case, sketch, _device_map(sketch, block_devices))
    # All blocks may be on the first of several GPUs: graphs, which only a whole model has, then
    # take more room there.
    exceeds_room = any(placement.taken(device) > size for device, size in room.items())
    return None if exceeds_room else placement


def _device_map(sketch: Sketch, block_devices: Sequence[Device]) -> DeviceMap:
    """The devices of blocks as a map of their modules; `""` for all where there is only one."""
    if len(set(block_devices)) == 1:
        return {"": block_devices[0]}
    device_map: dict[str, Device] = {}
    for block, device in zip(sketch.blocks, block_devices, strict=True):
        device_map |= dict.fromkeys(block.modules, device)
    return device_map


def _placement(case: Case, sketch: Sketch, device_map: DeviceMap) -> Placement:
    """The placement by a map, with its bytes on each device."""
    if offloads(device_map) and sketch.stored is not None:
        parts = f"parts of {sketch.settings.name}"
        rule = f"{parts} cannot be outside the GPUs: its weights are quantized already"
        raise SettingError("placement", rule)
    devices = list(dict.fromkeys(device_map.values()))
    on_gpu = any(isinstance(device, int) for device in devices)
    # A model on disk is computed in main memory, part by part.
    whole = len(devices) == 1 and devices != ["disk"]
    needs = case.needs(sketch, whole=whole, on_gpu=on_gpu)
    caches = sketch.caches_on(device_map, needs.tokens, needs.states)
    if needs.graph_bytes:
        name = device_name(devices[0])
        caches[name] = caches.get(name, 0) + needs.graph_bytes
    return Placement(device_map, sketch.weights_on(device_map), caches)


def _place_explicitly(case: Case, sketch: Sketch, typed_map: Mapping[str, Any]) -> Placement:
    """Follow the user's map, if it suits the model and the machine.

    Only a target has a map, and is then placed first: all that is free is there for it. A map keeps
    no reserve.
    """
    setting = "placement.device_map"
    device_map = {str(module): parse_device(device) for module, device in typed_map.items()}
    for device in device_map.values():
        if device not in case.free and device != "disk":
            known = ", ".join([*map(str, case.free), "disk"])
            raise SettingError(setting, f"must name devices of this machine ({known})", device)
    for module in device_map:
        if module not in sketch.modules:
            raise SettingError(setting, f"must name modules of {sketch.class_name}", module)
    try:
        placement = _placement(case, sketch, device_map)
    except KeyError as missing:
        rule = f"must cover the whole model; {missing.args[0]} is on no device"
        raise SettingError(setting, rule) from missing
    for device, free in case.free.items():
        taken = placement.taken(device)
        if taken > free:
            name = sketch.settings.name
            puts = f"{setting} puts {amount(taken)} of {name} on {device_name(device)}"
            why = f"{puts}, and {amount(free)} are free there"
            raise Misfit(f"{sketch.role}: {name} does not fit: {why}")
    return placement


# Sharing out --------------------------------------------------------------------------------------


def filled(loads: Sequence[int], rooms: Sequence[int]) -> list[int]:
    """Fill rooms with loads, in order: three loads of 4 in rooms of 8 and 8 are [0, 0, 1].

    Returns:
        For each load the index of its room; empty if they do not fit.
    """
    index = 0
    left = rooms[0]
    places = []
    for load in loads:
        while load > left:
            index += 1
            if index == len(rooms):
                return []
            left = rooms[index]
        left -= load
        places.append(index)
    return places


def balanced(loads: Sequence[int], rooms: Sequence[int]) -> list[int]:
    """The same as `filled`, with no room filled further than necessary.

    Four loads of 2 in rooms of 8 and 8 are [0, 0, 1, 1], where `filled` puts all into the first.
    """

    def fill_up_to(limit: int) -> list[int]:
        return filled(loads, [min(limit, room) for room in rooms])

    lowest = bisect.bisect_left(range(max(rooms)), True, key=lambda limit: bool(fill_up_to(limit)))
    return fill_up_to(lowest)


def roomiest(gpus: Sequence[int], room: Memory, count: int) -> list[int]:
    """The `count` GPUs with the most room, the first ones where it is equal, in their own order."""
    by_room = sorted(gpus, key=lambda gpu: (-room[gpu], gpu))
    return sorted(by_room[:count])


def _fewest_first(gpus: Sequence[int], room: Memory) -> list[list[int]]:
    """The roomiest GPU, the two roomiest, and so on."""
    return [roomiest(gpus, room, count) for count in range(1, len(gpus) + 1)]
