"""Whether models fit and where their layers go: arithmetic on sketches, free bytes and the needs of a run.

No model is needed, so any machine can be pretended.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from harness.config.amounts import amount
from harness.config.errors import RunError, SettingError
from harness.config.run import RunnerName
from harness.config.settings import ModelSettings, PlacementSettings
from harness.models.ranks import world
from harness.models.sketch import DeviceMap, Sketch, device_name, offloads
from harness.runners.static import BUCKET

# Bytes by device: a GPU's index or "cpu".
Memory = Mapping[int | str, int]


class Misfit(RunError):
    """A model that found no place: what it needs and what is free, in one line."""


@dataclass(frozen=True)
class Demand:
    """What a run needs in addition to weights.

    `batch_size` is the most rows that are decoded at once, `prompt_tokens` are of the longest prompt, and
    `num_draft_tokens` is K, or 0 without a draft.
    """

    batch_size: int
    prompt_tokens: int
    new_tokens: int
    num_draft_tokens: int
    runner: RunnerName

    @property
    def row_tokens(self) -> int:
        """Tokens of the longest row: its prompt, what is generated, and what is drafted beyond it."""
        return self.prompt_tokens + self.new_tokens + self.num_draft_tokens

    def cached_tokens(self, runner: RunnerName, slots: int = 0) -> int:
        """Tokens of a row whose keys and values a runner holds at its fullest moment; or a head, by its `slots`."""
        if slots:
            first = self.prompt_tokens + self.num_draft_tokens + slots
            # What is full is kept until all is copied.
            return first if self.row_tokens <= first else 2 * self.row_tokens + slots
        if runner == "eager":
            return self.row_tokens
        # The prompt is read into a separate cache and copied from there.
        return -(-(self.row_tokens + 1) // BUCKET) * BUCKET + self.prompt_tokens

    def graph_bytes(self, sketch: Sketch, *, drafts: bool) -> int:
        """An estimate of what captured graphs hold: the results of each, and as much again for their working memory.

        A target's results are the logits of one token and of K + 1, each also with what is decided, which takes K
        distributions in float32; a draft's those of one token and of two, each also with K such distributions.
        """
        k = self.num_draft_tokens
        logits = (3 if drafts else 2 * (k + 2) if k else 2) * sketch.dtype.itemsize
        return (
            2 * self.batch_size * sketch.vocabulary_size * (logits + (2 if drafts else 1) * k * 4)
        )


@dataclass(frozen=True)
class Placement:
    """Where one model is.

    Attributes:
        device_map: from module names to a GPU's index, `"cpu"` or `"disk"`; `""` is the whole model.
        bytes_per_device: of weights and buffers, by `cuda:0`, `cpu` or `disk`.
        cache_per_device: of keys, values and graphs at the fullest moment.
        num_ranks: processes that hold the model, this one's part of it by `device_map`, all of them by the bytes.
        split: whether each has a part of every layer; otherwise each has a copy.
    """

    device_map: DeviceMap
    bytes_per_device: dict[str, int]
    cache_per_device: dict[str, int] = field(default_factory=dict)
    num_ranks: int = 1
    split: bool = False

    @property
    def devices(self) -> list[torch.device]:
        """Every device that computes layers; those on disk are computed on the CPU."""
        names = (device_name(device).replace("disk", "cpu") for device in self.device_map.values())
        return [torch.device(name) for name in dict.fromkeys(names)]

    def taken(self, device: int | str) -> int:
        """Bytes of weights and caches on a device."""
        name = device_name(device)
        return self.bytes_per_device.get(name, 0) + self.cache_per_device.get(name, 0)


@dataclass(frozen=True)
class Case:
    """What is to be placed, and where: the target, then the draft if it does not share its weights (`shared`).

    The models' own settings override `placement`. Without a GPU in `free` everything goes to the CPU.
    """

    models: tuple[Sketch, ...]
    placement: PlacementSettings
    free: Memory
    demand: Demand
    shared: bool = False

    @property
    def gpus(self) -> list[int]:
        """All GPUs of the machine."""
        return sorted(device for device in self.free if isinstance(device, int))

    @property
    def room(self) -> dict[int | str, int]:
        """Bytes that may be used: on each GPU all but the reserve."""
        reserve = int(self.placement.reserve_gb * 1e9)
        return {d: max(0, n - (reserve if isinstance(d, int) else 0)) for d, n in self.free.items()}

    def how(self, sketch: Sketch) -> PlacementSettings:
        """See `effective_placement`."""
        return effective_placement(sketch.role, sketch.settings, self.placement)

    def pool(self, sketch: Sketch) -> list[int]:
        """The GPUs that a model may use. Its own number of them does not say which."""
        how = self.how(sketch)
        return (
            []
            if how.strategy == "cpu"
            else self.gpus
            if sketch.settings.gpus
            else self.gpus[: how.gpus]
        )

    def held(self, sketch: Sketch, *, whole: bool, on_gpu: bool) -> tuple[tuple[int, int], int]:
        """Tokens that are cached for a model, over all rows, with its recurrent states; and bytes of graphs.

        What is neither compiled nor captured, because it is in 8 bit or on several devices, has a static cache. A
        recurrent model has all twice, before and after the draft tokens.
        """
        runner = self.demand.runner
        if runner == "auto":
            runner = "graphs" if on_gpu else "static"
        if runner != "eager" and (not whole or "8bit" in (sketch.quantization, sketch.stored)):
            runner = "static"
        drafts = [False, True] if self.shared else [sketch.role == "draft"]
        if sketch.state_bytes:
            states = (
                len(drafts) * self.demand.batch_size * (2 if self.demand.num_draft_tokens else 1)
            )
            return (states * self.demand.row_tokens, states), 0
        captured = drafts if on_gpu and runner.startswith("graphs") and not sketch.slots else []
        tokens = (
            len(drafts) * self.demand.batch_size * self.demand.cached_tokens(runner, sketch.slots)
        )
        return (tokens, 0), sum(self.demand.graph_bytes(sketch, drafts=d) for d in captured)


def effective_placement(
    role: str, settings: ModelSettings, placement: PlacementSettings
) -> PlacementSettings:
    """The run's placement with what a model's own settings override; an explicit map is the target's alone."""
    device_map = placement.device_map if role == "model" else None
    strategy = placement.strategy_for(role, settings)
    if device_map is not None and not any(
        isinstance(_parse_device(d), int) for d in device_map.values()
    ):
        strategy = "cpu"
    return replace(
        placement, strategy=strategy, gpus=settings.gpus or placement.gpus, device_map=device_map
    )


def fit(case: Case) -> list[Placement]:
    """Place the target, and the draft on what it leaves.

    `auto` takes the fewest GPUs that hold both and spreads the target evenly over the fewest of these, `balanced`
    spreads evenly over all, `sequential` fills one after the other, and `single` takes the one with the most room. A
    draft stays whole on the GPU with the most room, unless its own settings say otherwise or no GPU holds it.

    Raises Misfit if a model finds no place, and SettingError for an explicit map that does not suit model or machine,
    or a model that cannot be split or offloaded.
    """
    split = next(
        (how for how in map(case.how, case.models) if how.strategy == "tensor_parallel"), None
    )
    if split is not None:
        # The processes that run, or those that would on a machine with these GPUs.
        here = world().size
        num_ranks = here if here > 1 else len(case.gpus[: split.gpus]) or split.gpus or 1
        if num_ranks > 1:
            return _fit_on_ranks(case, num_ranks)
    target, gpus = case.models[0], case.gpus[: case.placement.gpus]
    limits = [gpus]
    if gpus and case.how(target).strategy == "auto" and not target.settings.gpus:
        limits = [roomiest(gpus, case.free, count) for count in range(1, len(gpus) + 1)]
    # A draft that stays whole may have to come before the target that is spread around it.
    orders = [1, -1] if len(case.models) > 1 and case.placement.device_map is None else [1]
    attempts = [(order, limit, True, False) for limit in limits for order in orders]
    attempts += [(1, limit, False, False) for limit in limits]
    attempts += [(1, gpus, False, True)] if case.placement.offload != "none" else []
    for order, limit, whole_draft, offload in attempts:
        room, placements = case.room, []
        try:
            for sketch in case.models[::order]:
                placed = _place(
                    case, sketch, room, _ways(case, sketch, room, limit, whole_draft), offload
                )
                room = {device: max(0, n - placed.taken(device)) for device, n in room.items()}
                placements.append(placed)
            return placements[::order]
        except Misfit as exception:
            misfit = exception
    raise misfit


def _ways(
    case: Case, sketch: Sketch, room: Memory, limit: list[int], whole_draft: bool
) -> list[list[int]]:
    """The GPUs over which a model may be spread, to be tried in turn; an empty list is the CPU.

    They are within `limit`, unless the model's own settings say otherwise.
    """
    strategy, own = case.how(sketch).strategy, sketch.settings
    gpus = [
        gpu
        for gpu in case.pool(sketch)
        if gpu in limit or own.gpus or (sketch.role == "draft" and own.placement)
    ]
    if sketch.role == "draft" and not (own.placement or own.gpus) and strategy != "single":
        strategy = "single" if whole_draft else "balanced"
    if not gpus:
        return [[]]
    if strategy == "single" or len(sketch.blocks) == 1:
        return [roomiest(gpus, room, 1)]
    if own.gpus:
        return [roomiest(gpus, room, own.gpus)]
    if strategy == "auto":
        return [roomiest(gpus, room, count + 1) for count in range(len(gpus))]
    return [gpus[: count + 1] for count in range(len(gpus))] if strategy == "sequential" else [gpus]


def _place(
    case: Case, sketch: Sketch, room: Memory, ways: list[list[int]], offload: bool
) -> Placement:
    """In the first way there is room for; with the last layers outside the GPUs where that is allowed and necessary.

    Those are computed on the first device, which holds their caches and has room to bring in one of them.
    """
    how, away = case.how(sketch), case.placement.offload
    if how.device_map is not None:
        return _place_explicitly(case, sketch, how.device_map)
    for gpus in ways:
        devices: list[int | str] = [*gpus] or ["cpu"]
        for num_away in range(len(sketch.blocks) if offload and away not in devices else 1):
            num_here = len(sketch.blocks) - num_away
            held, graphs = case.held(
                sketch, whole=len(devices) == 1 and not num_away, on_gpu=bool(gpus)
            )
            caches = sketch.block_caches(*held)
            sizes = sketch.plain_bytes if num_away and not gpus else sketch.block_bytes
            loads = [size + cache for size, cache in zip(sizes, caches, strict=True)][:num_here]
            loads[-1] += graphs
            rooms = [room[device] for device in devices]
            rooms[0] -= max(sketch.plain_bytes[num_here:], default=0) + sum(caches[num_here:])
            shared_out = filled if num_away or how.strategy == "sequential" else balanced
            if not (where := shared_out(loads, rooms)):
                continue
            places = [*(devices[index] for index in where), *[away] * num_away]
            names = {
                name: place
                for block, place in zip(sketch.blocks, places, strict=True)
                for name in block.modules
            }
            placed = _measured(case, sketch, {"": places[0]} if len(set(places)) == 1 else names)
            # A model that turns out to be on one of several GPUs needs more there, for graphs.
            if all(placed.taken(device) <= n for device, n in room.items()):
                return placed
    raise _misfit(case, sketch, {device: room[device] for device in devices})


def _place_explicitly(case: Case, sketch: Sketch, given: Mapping[str, Any]) -> Placement:
    """The map the user gave, once it is known to suit the model and the machine. It keeps no reserve."""
    setting = "placement.device_map"
    device_map = {str(module): _parse_device(device) for module, device in given.items()}
    for device in device_map.values():
        if device not in case.free and device != "disk":
            known = ", ".join([*map(str, case.free), "disk"])
            raise SettingError(setting, f"must name devices of this machine ({known})", device)
    if unknown := [module for module in device_map if module not in sketch.modules]:
        raise SettingError(setting, f"must name modules of {sketch.class_name}", unknown[0])
    try:
        placed = _measured(case, sketch, device_map)
    except KeyError as missing:
        raise SettingError(
            setting, f"must cover the whole model; {missing.args[0]} is on no device"
        ) from missing
    for device, available in case.free.items():
        if (taken := placed.taken(device)) > available:
            puts = f"puts {amount(taken)} of {sketch.settings.name} on {device_name(device)}"
            why = f"{setting} {puts}, and {amount(available)} are free there"
            raise Misfit(f"{sketch.role}: {sketch.settings.name} does not fit: {why}")
    return placed


def _parse_device(device: object) -> int | str:
    """`0`, `"0"` and `"cuda:0"` as 0; anything else as it is written."""
    text = str(device).removeprefix("cuda:")
    return int(text) if text.isdigit() else text


def _measured(case: Case, sketch: Sketch, device_map: DeviceMap) -> Placement:
    """A placement by this map, with its bytes."""
    if offloads(device_map) and sketch.stored is not None:
        rule = f"parts of {sketch.settings.name} cannot be outside the GPUs: its weights are quantized already"
        raise SettingError("placement", rule)
    places = set(device_map.values())
    on_gpu = any(isinstance(place, int) for place in places)
    held, graphs = case.held(sketch, whole=len(places) == 1 and "disk" not in places, on_gpu=on_gpu)
    caches = sketch.caches_on(device_map, *held)
    if graphs:
        (device,) = map(device_name, places)
        caches[device] = caches.get(device, 0) + graphs
    return Placement(device_map, sketch.weights_on(device_map), caches)


def _fit_on_ranks(case: Case, num_ranks: int) -> list[Placement]:
    """Every rank alike: its part of what is split, a copy of what is not, and a GPU for each if there are GPUs."""
    placements, room = [], case.room
    for sketch in case.models:
        split, on_gpus = case.how(sketch).strategy == "tensor_parallel", bool(case.pool(sketch))
        _check_ranks(sketch, num_ranks, split)
        held, graphs = case.held(sketch, whole=not split, on_gpu=on_gpus)
        size = sketch.rank_bytes(num_ranks) if split else sketch.weight_bytes
        cache = graphs + sum(sketch.block_caches(*held)) // (
            num_ranks if split and sketch.splits_cache else 1
        )
        # Main memory holds what all ranks have.
        devices, times = (
            ([f"cuda:{n}" for n in range(num_ranks)], 1) if on_gpus else (["cpu"], num_ranks)
        )
        weights, caches = (
            dict.fromkeys(devices, times * size),
            dict.fromkeys(devices, times * cache),
        )
        placed = Placement(
            {"": world().rank if on_gpus else "cpu"}, weights, caches, num_ranks, split
        )
        if any(placed.taken(device) > n for device, n in room.items()):
            raise _misfit(
                case,
                sketch,
                {d: n for d, n in room.items() if isinstance(d, int) == on_gpus},
                num_ranks,
            )
        placements.append(placed)
        room = {device: n - placed.taken(device) for device, n in room.items()}
    return placements


def _check_ranks(sketch: Sketch, num_ranks: int, split: bool) -> None:
    settings, quantized = sketch.settings, sketch.stored or sketch.quantization
    only, what = (num_ranks, "a part") if split else (1, "a copy")
    if settings.gpus not in (None, only):
        rule = f"must be {only} where {num_ranks} ranks hold {what} each"
        raise SettingError(f"{sketch.role}.gpus", rule, settings.gpus)
    uneven = next(
        (f"{number} {kind} heads" for kind, number in sketch.heads.items() if number % num_ranks),
        None,
    )
    reason = ""
    if quantized != "none":
        reason = f": its weights are quantized ({quantized})"
    elif not sketch.tp_plan:
        reason = f": transformers has no tp_plan for {sketch.class_name}"
    elif uneven is not None:
        reason = f" over {num_ranks} ranks, which cannot share its {uneven} evenly"
    if split and reason:
        raise SettingError(
            sketch.role, f"cannot be combined with tensor_parallel{reason}", settings.name
        )


def _misfit(case: Case, sketch: Sketch, room: Memory, num_ranks: int = 1) -> Misfit:
    """What the model needs and what is free on the devices that it was offered."""
    rooms, on_gpu = list(room.values()), "cpu" not in room
    if on_gpu:
        count = "one GPU has" if len(rooms) == 1 else f"{len(rooms)} GPUs have"
        alike = len(rooms) > 2 and len(set(rooms)) == 1
        amounts = f"{amount(rooms[0])} each" if alike else " + ".join(map(amount, rooms))
        free = f"{count} {amounts} free beyond placement.reserve_gb"
    else:
        free = f"{amount(rooms[0])} of main memory are free"
    held = (
        str(sketch.dtype).removeprefix("torch.")
        if sketch.quantization == "none"
        else sketch.quantization
    )
    held += f" with {num_ranks} ranks" if num_ranks > 1 else ""
    tokens, graphs = case.held(sketch, whole=len(rooms) == 1, on_gpu=on_gpu)
    cached = sum(sketch.block_caches(*tokens))
    cache = f" and its KV cache {amount(cached + graphs)}" if cached else ""
    where = " next to the model" if sketch.role == "draft" else ""
    needs = f"its weights need {amount(sketch.weight_bytes)} in {held}{cache}"
    return Misfit(f"{sketch.role}: {sketch.settings.name} does not fit{where}: {needs}, {free}")


def filled(loads: Sequence[int], rooms: Sequence[int]) -> list[int]:
    """For each load, in order, the index of the first room that still has place; empty if the rooms do not suffice."""
    index, left, where = 0, rooms[0], []
    for load in loads:
        while load > left:
            index += 1
            if index == len(rooms):
                return []
            left = rooms[index]
        left -= load
        where.append(index)
    return where


def balanced(loads: Sequence[int], rooms: Sequence[int]) -> list[int]:
    """As `filled`, with no room filled further than necessary."""

    def up_to(limit: int) -> list[int]:
        return filled(loads, [min(limit, room) for room in rooms])

    return up_to(bisect.bisect_left(range(max(rooms)), True, key=lambda limit: bool(up_to(limit))))


def roomiest(gpus: Sequence[int], room: Mapping[int | str, int], count: int) -> list[int]:
    """Those with the most room, the first where they are equal, in their own order."""
    return sorted(sorted(gpus, key=lambda gpu: (-room[gpu], gpu))[:count])
