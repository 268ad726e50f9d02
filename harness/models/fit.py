"""Whether models fit, and where their layers go."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.config.amounts import amount
from harness.config.errors import SettingError
from harness.models.case import Case, Memory, Misfit, Placement, parse_device
from harness.models.ranks import world
from harness.models.sketch import DeviceMap, Sketch, device_name, offloads


def fit(case: Case) -> list[Placement]:
    """Place the target, and the draft on the remaining memory.

    `auto` takes the fewest GPUs that hold both and spreads the target evenly over the fewest of
    these, `balanced` spreads evenly over all, `sequential` fills one after the other, and `single`
    takes the one with the most room. A draft stays whole on the GPU with the most room, unless its
    own settings say otherwise or no GPU holds it.

    Raises:
        Misfit: there is no room for a model.
        SettingError: an explicit map that does not suit model or machine, or a model that cannot
            be split or offloaded.
    """
    num_ranks = _num_ranks(case)
    attempts = _attempts(case) if num_ranks == 1 else [_Attempt(num_ranks=num_ranks)]
    for attempt in attempts:
        try:
            return _place_all(case, attempt)
        except Misfit as exception:
            misfit = exception
    raise misfit


# Attempts -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Attempt:
    """One way to place all models.

    Attributes:
        gpus: allowed for models whose own settings say nothing about GPUs.
        draft_first: whether the draft chooses its GPU before the target.
        split_draft: whether the draft may be on several GPUs.
        offload: whether the last layers may be outside the GPUs.
        num_ranks: processes that hold the models; more than one leave no other choice.
    """

    gpus: Sequence[int] = ()
    draft_first: bool = False
    split_draft: bool = False
    offload: bool = False
    num_ranks: int = 1


def _attempts(case: Case) -> Iterator[_Attempt]:
    """All ways to place the models, the best first."""
    target = case.models[0]
    gpus = case.gpus[: case.placement.gpus]
    choices = [gpus]
    if gpus and case.how(target).strategy == "auto" and not target.settings.gpus:
        choices = _fewest_first(gpus, case.free)
    for choice in choices:
        yield _Attempt(choice)
        if len(case.models) > 1 and case.placement.device_map is None:
            # A whole draft may need a GPU that the target would have shared evenly.
            yield _Attempt(choice, draft_first=True)
    for choice in choices:
        yield _Attempt(choice, split_draft=True)
    if case.placement.offload != "none":
        yield _Attempt(gpus, split_draft=True, offload=True)


def _place_all(case: Case, attempt: _Attempt) -> list[Placement]:
    room = case.room
    order = -1 if attempt.draft_first else 1
    placements = []
    for sketch in case.models[::order]:
        placement = _place(case, sketch, room, attempt)
        room = {device: max(0, size - placement.taken(device)) for device, size in room.items()}
        placements.append(placement)
    return placements[::order]


# One model ----------------------------------------------------------------------------------------


def _place(case: Case, sketch: Sketch, room: Memory, attempt: _Attempt) -> Placement:
    """Place a model on the first choice of devices that holds it, with the least offloaded."""
    if attempt.num_ranks > 1:
        return _place_on_ranks(case, sketch, room, attempt.num_ranks)
    how = case.how(sketch)
    if how.device_map is not None:
        return _place_explicitly(case, sketch, how.device_map)
    choices = _gpu_choices(case, sketch, room, attempt)
    for num_offloaded in range(len(sketch.blocks) if attempt.offload else 1):
        for gpus in choices:
            devices: list[int | str] = [*gpus] or ["cpu"]
            if num_offloaded and case.placement.offload in devices:
                continue
            device_map = _share_out(case, sketch, room, devices, num_offloaded)
            if device_map is None:
                continue
            placement = _placement(case, sketch, device_map)
            # On one of several GPUs the model may need more room there, for graphs.
            if not placement.exceeds(room):
                return placement
    raise case.misfit(sketch, {device: room[device] for device in devices})


def _gpu_choices(case: Case, sketch: Sketch, room: Memory, attempt: _Attempt) -> list[list[int]]:
    """Lists of GPUs to try in turn for a model; an empty list is the CPU."""
    settings = sketch.settings
    is_draft = sketch.role == "draft"
    strategy = case.how(sketch).strategy
    gpus = case.pool(sketch)
    if not (settings.gpus or (is_draft and settings.placement)):
        gpus = [gpu for gpu in gpus if gpu in attempt.gpus]
    if is_draft and not (settings.placement or settings.gpus):
        strategy = "balanced" if attempt.split_draft and strategy != "single" else "single"
    if not gpus:
        return [[]]
    if strategy == "single" or len(sketch.blocks) == 1:
        return [roomiest(gpus, room, 1)]
    if settings.gpus:
        return [roomiest(gpus, room, settings.gpus)]
    if strategy == "auto":
        return _fewest_first(gpus, room)
    if strategy == "sequential":
        return [gpus[:count] for count in range(1, len(gpus) + 1)]
    return [gpus]


def _share_out(
    case: Case, sketch: Sketch, room: Memory, devices: Sequence[int | str], num_offloaded: int
) -> DeviceMap | None:
    """Put a model's blocks on devices in order, the last ones outside; None if there is no room.

    The first device computes the blocks outside: it holds their caches, and has room for one.
    """
    num_here = len(sketch.blocks) - num_offloaded
    on_gpu = devices[0] != "cpu"
    whole = len(devices) == 1 and not num_offloaded
    needs = case.needs(sketch, whole=whole, on_gpu=on_gpu)
    caches = sketch.block_caches(needs.tokens, needs.states)
    weights = sketch.unquantized_bytes if num_offloaded and not on_gpu else sketch.block_bytes
    loads = [weights[block] + caches[block] for block in range(num_here)]
    loads[-1] += needs.graph_bytes
    rooms = [room[device] for device in devices]
    rooms[0] -= max(sketch.unquantized_bytes[num_here:], default=0) + sum(caches[num_here:])
    in_order = num_offloaded or case.how(sketch).strategy == "sequential"
    places = filled(loads, rooms) if in_order else balanced(loads, rooms)
    if not places:
        return None
    block_devices = [devices[place] for place in places]
    block_devices += [case.placement.offload] * num_offloaded
    if len(set(block_devices)) == 1:
        return {"": block_devices[0]}
    device_map: dict[str, int | str] = {}
    for block, device in zip(sketch.blocks, block_devices, strict=True):
        device_map |= dict.fromkeys(block.modules, device)
    return device_map


def _placement(case: Case, sketch: Sketch, device_map: DeviceMap) -> Placement:
    """The placement by a map, with its bytes."""
    if offloads(device_map) and sketch.stored is not None:
        parts = f"parts of {sketch.settings.name}"
        rule = f"{parts} cannot be outside the GPUs: its weights are quantized already"
        raise SettingError("placement", rule)
    devices = list(dict.fromkeys(device_map.values()))
    on_gpu = any(isinstance(device, int) for device in devices)
    whole = len(devices) == 1 and devices != ["disk"]
    needs = case.needs(sketch, whole=whole, on_gpu=on_gpu)
    caches = sketch.caches_on(device_map, needs.tokens, needs.states)
    if needs.graph_bytes:
        name = device_name(devices[0])
        caches[name] = caches.get(name, 0) + needs.graph_bytes
    return Placement(device_map, sketch.weights_on(device_map), caches)


def _place_explicitly(case: Case, sketch: Sketch, typed_map: Mapping[str, Any]) -> Placement:
    """Follow the user's map, if it suits the model and the machine. It keeps no reserve."""
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


# Ranks --------------------------------------------------------------------------------------------


def _num_ranks(case: Case) -> int:
    """Number of processes that run, or would on such a machine; 1 without tensor_parallel."""
    for how in map(case.how, case.models):
        if how.strategy == "tensor_parallel":
            if world().size > 1:
                return world().size
            return len(case.gpus[: how.gpus]) or how.gpus or 1
    return 1


def _place_on_ranks(case: Case, sketch: Sketch, room: Memory, num_ranks: int) -> Placement:
    """Give every rank its part of a split model, or a copy, and a GPU if there are GPUs."""
    split = case.how(sketch).strategy == "tensor_parallel"
    on_gpu = bool(case.pool(sketch))
    _check_ranks(sketch, num_ranks, split)
    needs = case.needs(sketch, whole=not split, on_gpu=on_gpu)
    weights = sketch.rank_bytes(num_ranks) if split else sketch.weight_bytes
    cache = sum(sketch.block_caches(needs.tokens, needs.states))
    if split and sketch.splits_cache:
        cache //= num_ranks
    cache += needs.graph_bytes
    if on_gpu:
        names = [f"cuda:{rank}" for rank in range(num_ranks)]
        device: int | str = world().rank
    else:
        # Main memory holds what all ranks have.
        names = ["cpu"]
        device = "cpu"
        weights = num_ranks * weights
        cache = num_ranks * cache
    bytes_per_device = dict.fromkeys(names, weights)
    cache_per_device = dict.fromkeys(names, cache)
    placement = Placement(
        device_map={"": device},
        bytes_per_device=bytes_per_device,
        cache_per_device=cache_per_device,
        num_ranks=num_ranks,
        split=split,
    )
    if placement.exceeds(room):
        offered = {d: size for d, size in room.items() if isinstance(d, int) == on_gpu}
        raise case.misfit(sketch, offered, num_ranks)
    return placement


def _check_ranks(sketch: Sketch, num_ranks: int, split: bool) -> None:
    settings = sketch.settings
    num_gpus, share = (num_ranks, "a part") if split else (1, "a copy")
    if settings.gpus not in (None, num_gpus):
        rule = f"must be {num_gpus} where {num_ranks} ranks hold {share} each"
        raise SettingError(f"{sketch.role}.gpus", rule, settings.gpus)
    reason = _why_not_split(sketch, num_ranks)
    if split and reason:
        rule = f"cannot be combined with tensor_parallel{reason}"
        raise SettingError(sketch.role, rule, settings.name)


def _why_not_split(sketch: Sketch, num_ranks: int) -> str:
    """Return the reason why `num_ranks` ranks cannot share a model, to end a sentence; empty for
    none.
    """
    quantization = sketch.stored or sketch.quantization
    if quantization != "none":
        return f": its weights are quantized ({quantization})"
    if not sketch.supports_tensor_parallel:
        return f": transformers has no tp_plan for {sketch.class_name}"
    for kind, number in sketch.heads.items():
        if number % num_ranks:
            heads = f"{number} {kind} heads"
            return f" over {num_ranks} ranks, which cannot share its {heads} evenly"
    return ""


# Sharing out --------------------------------------------------------------------------------------


def filled(loads: Sequence[int], rooms: Sequence[int]) -> list[int]:
    """Fill rooms with loads, in order.

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
    """The same as `filled`, with no room filled further than necessary."""

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
