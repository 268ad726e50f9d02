"""Decides whether models fit, and on which device each layer goes: `fit` solves a `PlacementProblem`.

A problem holds numbers alone: sizes of the models, the run and the machine. So every what-if is a call of `fit` with a
changed problem: `plan gpus=4 gpu_memory=40GB` changes `free`, advice changes one setting at a time (`remedies`), and
`force=true` enlarges the memory.

    problem = PlacementProblem((target, draft), placement, free={0: 24 * GB, "cpu": 64 * GB}, demand=demand)
    fit(problem)                                                         # on one GPU of 24 GB
    fit(replace(problem, free={0: 24 * GB, 1: 24 * GB, "cpu": 64 * GB})) # and on two?

One rule answers it: the draft whole on the GPU with the most room, the target evenly over the fewest GPUs on which
both fit. Two GPUs with room for 24 GB each, a target of 30 GB, a draft of 14 GB:

1. On one GPU the draft leaves 10 GB: too little for the target.
2. On two GPUs the draft takes the second one. The first one alone is too small for the target.
3. Over both the target gets 20 GB on the first GPU, and 10 GB next to the draft: it fits.
"""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from harness.config.amounts import amount
from harness.config.demand import Demand, Remedy
from harness.config.errors import RunError, SettingError
from harness.config.model_names import canonical_name
from harness.config.settings import PlacementSettings, Quantization
from harness.local.models.sketch import Device, DeviceMap, Sketch, device_name, owning_module

# The published runs had 8 GPUs; beyond this many the answer is another model.
_MOST_GPUS = 64

# From the mildest to the strongest.
_QUANTIZATIONS: tuple[Quantization, ...] = ("none", "8bit", "4bit")

# Bytes by device.
Memory = Mapping[Device, int]


class Misfit(RunError):
    """There is no room for a model. The message has what it needs and what is free, in one line."""


@dataclass(frozen=True)
class Placement:
    """The devices of one model.

    Attributes:
        device_map: from module names to devices; `""` is the whole model.
        bytes_per_device: weights and buffers, by `cuda:0` or `cpu`.
        cache_per_device: keys and values at their largest.
    """

    device_map: DeviceMap
    bytes_per_device: dict[str, int]
    cache_per_device: dict[str, int]

    @property
    def devices(self) -> list[torch.device]:
        """Every device that has a layer, in the order of the layers."""
        devices = dict.fromkeys(self.device_map.values())
        return [torch.device(device_name(device)) for device in devices]

    def taken(self, device: Device) -> int:
        """Bytes of weights and caches on a device."""
        name = device_name(device)
        return self.bytes_per_device.get(name, 0) + self.cache_per_device.get(name, 0)


@dataclass(frozen=True)
class PlacementProblem:
    """The models to place, the machine, and the run.

    Attributes:
        models: the target, then a draft model or head.
        placement: settings for both models; an explicit map is the target's alone.
        free: bytes on each usable GPU, and in main memory (`"cpu"`). Without a GPU everything goes
            to the CPU.
    """

    models: tuple[Sketch, ...]
    placement: PlacementSettings
    free: Memory
    demand: Demand

    @property
    def over_several_gpus(self) -> PlacementProblem:
        """The same problem for a target on several GPUs: a draft head then holds copies of the matrices of the
        target that it uses, where on a single GPU it would share them.
        """
        models = [
            replace(sketch, blocks=(*sketch.blocks, *sketch.copied), copied=())
            for sketch in self.models
        ]
        return replace(self, models=tuple(models))

    @property
    def gpus(self) -> list[int]:
        """All GPUs of the machine."""
        return sorted(device for device in self.free if isinstance(device, int))

    @property
    def room(self) -> dict[Device, int]:
        """Bytes that may be filled: all that are free, on GPUs without the reserve."""
        room = dict(self.free)
        for gpu in self.gpus:
            room[gpu] = max(0, room[gpu] - self.reserve_bytes)
        return room

    @property
    def reserve_bytes(self) -> int:
        """Bytes that stay free on each GPU: `placement.reserve_gb`, or more if reading prompts takes more."""
        return max(int(self.placement.reserve_gb * 1e9), self.prompt_bytes)

    @property
    def prompt_bytes(self) -> int:
        """Estimated bytes to read all prompts, beyond weights and caches: a layer's activations, and the logits after
        each prompt, also in float32. One model reads after the other, so the larger estimate counts.
        """
        num_rows = self.demand.batch_size
        num_tokens = num_rows * self.demand.prompt_tokens
        sizes = []
        for sketch in self.models:
            itemsize = sketch.dtype.itemsize
            activations = num_tokens * sketch.pass_numbers * itemsize
            sizes.append(activations + num_rows * sketch.vocabulary_size * (itemsize + 4))
        return max(sizes)

    @property
    def run_gpus(self) -> list[int]:
        """The GPUs of the run: of `placement.gpus=2` the first two."""
        if self.placement.strategy == "cpu":
            return []
        return self.gpus[: self.placement.gpus]

    def block_caches(self, sketch: Sketch) -> list[int]:
        """Return the bytes of each block's caches at their largest, of all rows."""
        demand = self.demand
        num_rows = demand.batch_size
        if sketch.state_bytes:
            # The state before the draft tokens is kept alongside the one after them.
            num_states = num_rows * (2 if demand.num_draft_tokens else 1)
            return sketch.block_caches(num_states * demand.row_tokens, num_states)
        if sketch.spare_slots is not None:
            num_tokens = demand.head_tokens(sketch.spare_slots)
        elif sketch.drafts_in_one_pass:
            # K + 1 decided tokens with K - 1 masks.
            num_tokens = demand.runner_tokens(max(2, 2 * demand.num_draft_tokens))
        else:
            num_tokens = demand.runner_tokens()
        return sketch.block_caches(num_rows * num_tokens, num_states=0)

    def misfit(self, sketch: Sketch, room: Memory) -> Misfit:
        """Return the error for a model that does not fit into this room."""
        number_format = str(sketch.dtype).removeprefix("torch.")
        if sketch.quantization != "none":
            number_format = sketch.quantization
        text = f"its weights need {amount(sketch.weight_bytes)} in {number_format}"
        cache = sum(self.block_caches(sketch))
        if cache:
            text += f" and its KV cache {amount(cache)}"
        where = " next to the model" if sketch.role == "draft" else ""
        sizes = list(room.values())
        if "cpu" in room:
            free = f"{amount(sizes[0])} of main memory are free"
        else:
            count = "one GPU has" if len(sizes) == 1 else f"{len(sizes)} GPUs have"
            amounts = " + ".join(map(amount, sizes))
            if len(sizes) > 2 and len(set(sizes)) == 1:
                amounts = f"{amount(sizes[0])} each"
            reserve = "placement.reserve_gb"
            if self.prompt_bytes > self.placement.reserve_gb * 1e9:
                reserve = f"the {amount(self.reserve_bytes)} that reading the prompts takes"
            free = f"{count} {amounts} free beyond {reserve}"
        return Misfit(f"{sketch.role}: {sketch.settings.name} does not fit{where}: {text}, {free}")


def fit(problem: PlacementProblem) -> list[Placement]:
    """Place the target and the draft.

    `placement.strategy=balanced` spreads the target over all GPUs. A model with `gpus` set takes the
    roomiest GPUs of the machine. An explicit map is followed as typed; the draft then goes where
    room is left.

    Raises:
        Misfit: there is no room for a model.
        SettingError: an explicit map does not suit the model or the machine.
    """
    target, *drafts = problem.models
    if problem.placement.device_map is not None:
        placement = _place_as_typed(problem, problem.placement.device_map)
    else:
        for gpus, num_target_gpus in _choices(problem):
            if placements := _place(problem, gpus, num_target_gpus):
                return placements
        if not drafts:
            devices = _devices(problem, target, problem.run_gpus, problem.room)
            raise problem.misfit(target, {device: problem.room[device] for device in devices})
        # One after the other: if there still is no room, the error names the model that lacks it.
        [placement] = fit(replace(problem, models=(target,)))
    if not drafts:
        return [placement]
    free = {device: max(0, size - placement.taken(device)) for device, size in problem.free.items()}
    # The reserve of the larger model: both read the prompts.
    settings = replace(problem.placement, device_map=None, reserve_gb=problem.reserve_bytes / 1e9)
    models = (problem.over_several_gpus if len(placement.devices) > 1 else problem).models
    rest = replace(problem, models=models[1:], placement=settings, free=free)
    return [placement, *fit(rest)]


def _choices(problem: PlacementProblem) -> Iterator[tuple[Sequence[int], int]]:
    """Yield what to try, the best first: GPUs for all models together, and how many of these the target gets."""
    strategy = problem.placement.strategy
    gpus = problem.run_gpus
    if strategy != "auto" or not gpus or problem.models[0].settings.gpus:
        yield gpus, len(gpus)
        return
    for number in range(1, len(gpus) + 1):
        for num_target_gpus in range(1, number + 1):
            yield roomiest(gpus, problem.free, number), num_target_gpus


def _place(
    problem: PlacementProblem, gpus: Sequence[int], num_target_gpus: int
) -> list[Placement] | None:
    """Place the draft whole, then the target in the room that is left; None if there is too little room."""
    room = problem.room
    problem = problem.over_several_gpus if len(gpus) > 1 else problem
    placements: list[Placement] = []
    for sketch in reversed(problem.models):
        devices = _devices(problem, sketch, gpus, room, num_target_gpus)
        sizes = zip(sketch.block_bytes, problem.block_caches(sketch), strict=True)
        loads = [weights + cache for weights, cache in sizes]
        indices = balanced(loads, [room[device] for device in devices])
        if not indices:
            return None
        placement = _placement(problem, sketch, [devices[index] for index in indices])
        room = {device: max(0, size - placement.taken(device)) for device, size in room.items()}
        placements.insert(0, placement)
    return placements


def _devices(
    problem: PlacementProblem,
    sketch: Sketch,
    gpus: Sequence[int],
    room: Memory,
    num_gpus: int | None = None,
) -> Sequence[Device]:
    """Return the roomiest of `gpus`, or of the whole machine for a model with `gpus` set; "cpu" without any."""
    if not gpus:
        return ["cpu"]
    if sketch.settings.gpus:
        # Any will do: the setting says how many, not which.
        gpus = problem.gpus
        num_gpus = sketch.settings.gpus
    if sketch.role == "draft":
        # A draft stays whole. Of equal GPUs it gets the last, because the target begins on the first.
        return [max(gpus, key=lambda gpu: (room[gpu], gpu))]
    return roomiest(gpus, room, num_gpus or len(gpus))


def _placement(problem: PlacementProblem, sketch: Sketch, devices: Sequence[Device]) -> Placement:
    """Return the placement with `devices[i]` for the i-th block."""
    device_map: dict[str, Device] = {"": devices[0]}
    if len(set(devices)) > 1:
        device_map = {}
        for block, device in zip(sketch.blocks, devices, strict=True):
            device_map |= dict.fromkeys(block.modules, device)
    sizes = zip(sketch.block_bytes, problem.block_caches(sketch), strict=True)
    weights: Counter[str] = Counter()
    caches: Counter[str] = Counter()
    for device, (weight_bytes, cache_bytes) in zip(devices, sizes, strict=True):
        weights[device_name(device)] += weight_bytes
        caches[device_name(device)] += cache_bytes
    return Placement(device_map, dict(+weights), dict(+caches))


def _place_as_typed(problem: PlacementProblem, typed_map: Mapping[str, Any]) -> Placement:
    """Follow the user's map of the target, if it suits the model and the machine.

    `placement.reserve_gb` does not count here; the room to read the prompts does.
    """
    sketch = problem.models[0]
    setting = "placement.device_map"
    device_map: dict[str, Device] = {}
    for module, typed in typed_map.items():
        number = str(typed).removeprefix("cuda:")
        if number not in map(str, problem.gpus):
            numbers = ", ".join(map(str, problem.gpus)) or "none"
            raise SettingError(setting, f"must name GPUs of this machine ({numbers})", typed)
        device_map[str(module)] = int(number)
    blocks = [f"{name}." for block in sketch.blocks for name in block.modules]
    for module in filter(None, device_map):
        if not any(name.startswith(f"{module}.") for name in blocks):
            rule = f"must name modules of {sketch.settings.name}, and none inside a layer"
            raise SettingError(setting, rule, module)
    try:
        typed_modules = [owning_module(block.modules[0], device_map) for block in sketch.blocks]
    except KeyError as missing:
        rule = f"must cover the whole model; {missing.args[0]} is on no device"
        raise SettingError(setting, rule) from missing
    placement = _placement(problem, sketch, [device_map[module] for module in typed_modules])
    for device in set(device_map.values()):
        taken = placement.taken(device)
        if taken + problem.prompt_bytes > problem.free[device]:
            name = sketch.settings.name
            puts = f"{setting} puts {amount(taken)} of {name} on {device_name(device)}"
            prompts = f"reading the prompts takes {amount(problem.prompt_bytes)}"
            why = f"{puts}, {prompts}, and {amount(problem.free[device])} are free there"
            raise Misfit(f"{sketch.role}: {name} does not fit: {why}")
    return placement


def balanced(loads: Sequence[int], rooms: Sequence[int]) -> list[int]:
    """Distribute loads over rooms, in order, so that the fullest room holds as little as possible.

    Four loads of 2 in rooms of 8 and 8 are [0, 0, 1, 1].

    Returns:
        The index of each load's room; empty if they do not fit.
    """

    def fill_up_to(limit: int) -> list[int]:
        index = 0
        left = min(limit, rooms[0])
        indices = []
        for load in loads:
            while load > left:
                index += 1
                if index == len(rooms):
                    return []
                left = min(limit, rooms[index])
            left -= load
            indices.append(index)
        return indices

    # If no limit is enough, this is the largest room, and filling fails again.
    lowest = bisect.bisect_left(range(max(rooms)), True, key=lambda limit: bool(fill_up_to(limit)))
    return fill_up_to(lowest)


def roomiest(gpus: Sequence[int], room: Memory, count: int) -> list[int]:
    """Return the `count` GPUs with the most room, in ascending order; of equal ones the first."""
    by_room = sorted(gpus, key=lambda gpu: (-room[gpu], gpu))
    return sorted(by_room[:count])


# Advice if models do not fit: changed settings with which they would, as the user types them ---------


def fit_or_explain(problem: PlacementProblem, *, force: bool = False) -> list[Placement]:
    """Place the models as `fit` does, or with `force` as `fit_regardless` does.

    Raises:
        RunError: a model does not fit. The message has what it needs, what is free and what would fit.
    """
    try:
        return fit(problem)
    except Misfit as misfit:
        if force:
            return fit_regardless(problem)
        texts = ", ".join(map(str, remedies(problem)))
        advice = f"what would fit: {texts}" if texts else "a smaller model is needed"
        raise RunError(f"{misfit}\n{advice} (force=true tries anyway)") from None


def fit_regardless(problem: PlacementProblem) -> list[Placement]:
    """Place the models as if every device had more memory: the smallest factor that is enough, in steps of 5 %."""
    placement = replace(problem.placement, reserve_gb=0.0)
    # No factor enlarges a device without any free memory.
    free = {device: max(size, 10**8) for device, size in problem.free.items()}
    for step in range(1000):
        larger = {device: int(size * 1.05**step) for device, size in free.items()}
        with suppress(Misfit, SettingError):
            return fit(replace(problem, placement=placement, free=larger))
    raise RunError("the models fit on no machine, however large")


def remedies(problem: PlacementProblem) -> list[Remedy]:
    """Return changes of the settings or of the machine, each of which makes the models fit."""
    return [*_smaller_batch(problem), *_fewer_bits(problem), *_more_gpus(problem)]


def _fits(problem: PlacementProblem) -> bool:
    target, *drafts = problem.models
    # A model is no draft of its own.
    if any(
        draft.spare_slots is None and draft.settings.is_same(target.settings) for draft in drafts
    ):
        return False
    with suppress(Misfit, SettingError):
        return bool(fit(problem))
    return False


def _as_typed(sketch: Sketch, setting: Literal["quantization", "gpus"], value: object) -> str:
    """Return a model's changed setting as the user types it: `model=65B_4bit`, `model=65B_4GPUs`, or
    `model.quantization=4bit` for a repository, whose name takes no suffix.
    """
    name = sketch.settings.name
    if "/" in name:
        return f"{sketch.role}.{setting}={value}"
    suffix = f"{value}GPUs" if setting == "gpus" else value
    return f"{sketch.role}={canonical_name(f'{name}_{suffix}')}"


def _smaller_batch(problem: PlacementProblem) -> list[Remedy]:
    """Return the largest batch that fits; if not even one row does, its most new tokens."""

    def fits(**changes: Any) -> bool:
        return _fits(replace(problem, demand=replace(problem.demand, **changes)))

    demand = problem.demand
    rows = _largest_that_fits(demand.batch_size, lambda number: fits(batch_size=number))
    if rows:
        return [Remedy(f"batch_size={rows}")]
    tokens = _largest_that_fits(
        demand.new_tokens, lambda number: fits(batch_size=1, new_tokens=number)
    )
    one_row = f"batch_size=1 decoding.max_new_tokens={tokens}"
    return [Remedy(one_row)] if tokens else []


def _largest_that_fits(limit: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number below `limit` that fits; 0 for none."""
    # Every number up to it fits, so it is how many do.
    return bisect.bisect_left(range(1, limit), True, key=lambda number: not fits(number))


def _fewer_bits(problem: PlacementProblem) -> list[Remedy]:
    """Return each change of one model's bits that is enough; if none is, the mildest change of both."""
    smaller = [_quantized(sketch) for sketch in problem.models]
    changes = [[sketch] for sketches in smaller for sketch in sketches]
    fitting = [_in_fewer_bits(changed) for changed in changes if _fits(_changed(problem, changed))]
    if fitting:
        return fitting
    for pair in itertools.product(*smaller):
        if _fits(_changed(problem, pair)):
            return [_in_fewer_bits(pair)]
    return []


def _quantized(sketch: Sketch) -> list[Sketch]:
    """Return the model in each format of fewer bits."""
    # Without bitsandbytes, or if its weights are stored in such a format, no tensor has `outputs`.
    if not any(tensor.outputs for tensor in sketch.tensors):
        return []
    smaller = []
    for quantization in _QUANTIZATIONS[_QUANTIZATIONS.index(sketch.quantization) + 1 :]:
        settings = replace(sketch.settings, quantization=quantization)
        smaller.append(replace(sketch, settings=settings, quantization=quantization))
    return smaller


def _in_fewer_bits(sketches: Sequence[Sketch]) -> Remedy:
    typed = [_as_typed(sketch, "quantization", sketch.quantization) for sketch in sketches]
    return Remedy(" ".join(typed), amount(sum(sketch.weight_bytes for sketch in sketches)))


def _more_gpus(problem: PlacementProblem) -> list[Remedy]:
    """Return the smallest number of GPUs for the target that is enough.

    Further GPUs than the machine has are assumed to have as much free memory as the one that has most.
    """
    target = problem.models[0]
    if not problem.run_gpus:
        return []
    room = max(problem.free[gpu] for gpu in problem.gpus)
    for count in range(2, _MOST_GPUS + 1):
        spread = replace(target, settings=replace(target.settings, gpus=count))
        machine = replace(problem, free={**dict.fromkeys(range(count), room), **problem.free})
        if _fits(_changed(machine, [spread])):
            num_needed = count if count > len(problem.gpus) else None
            return [Remedy(_as_typed(target, "gpus", count), num_gpus=num_needed)]
    return []


def _changed(problem: PlacementProblem, sketches: Iterable[Sketch]) -> PlacementProblem:
    """Return the problem with these sketches in place of the models with the same roles."""
    by_role = {sketch.role: sketch for sketch in sketches}
    return replace(
        problem, models=tuple(by_role.get(sketch.role, sketch) for sketch in problem.models)
    )
