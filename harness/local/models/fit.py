"""Decides whether models fit into memory, and chooses the device of each layer: `fit` solves a `PlacementProblem`.

A problem consists of numbers: the sizes of the models, and those numbers of the run and of the machine that matter. So
every what-if question is a call of `fit` with a changed problem:

- `plan gpus=4 gpu_memory=40GB` changes `free`;
- advice changes one setting at a time (`remedies`);
- `force=true` increases the memory (`fit_regardless`).

    problem = PlacementProblem((target, draft), settings, free={0: 24 * GB, "cpu": 64 * GB}, demand=demand)
    fit(problem)                                                         # on one GPU of 24 GB
    fit(replace(problem, free={0: 24 * GB, 1: 24 * GB, "cpu": 64 * GB})) # and on two?

The draft is placed whole on the GPU with the most room. The target is spread over the smallest number of GPUs on which
both fit. accelerate divides the target's layers between these GPUs.
"""

from __future__ import annotations

import bisect
import copy
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from accelerate import infer_auto_device_map
from accelerate.utils import get_balanced_memory

from harness.config.amounts import amount
from harness.config.demand import Demand, Remedy
from harness.config.errors import RunError
from harness.config.model_names import canonical_name
from harness.config.settings import PlacementSettings, Quantization
from harness.local.models.sketch import Device, DeviceMap, Sketch, device_name, owning_module

# Advice never names more GPUs than this. If more would be needed, it names a smaller model.
_MOST_GPUS = 64

# The quantizations that are advised, in the order in which they are tried: the one that changes the model least first.
_QUANTIZATIONS: tuple[Quantization, ...] = ("8bit", "4bit")

# The number of bytes for each device.
Memory = Mapping[Device, int]


class Misfit(RunError):
    """Raised if the models do not fit. The message says in one line how much memory they need, and how much is free."""


@dataclass(frozen=True)
class Placement:
    """The devices of one model.

    Attributes:
        device_map: the device of each module, by the module's name; the name `""` means the whole model.
        bytes_per_device: the bytes of weights and buffers on each device, by its name, such as `cuda:0` or `cpu`.
        cache_per_device: the largest number of bytes of caches on each device, by its name.
    """

    device_map: DeviceMap
    bytes_per_device: dict[str, int]
    cache_per_device: dict[str, int]

    @property
    def devices(self) -> list[torch.device]:
        """All devices that hold a layer, in the order of the layers."""
        return list(map(torch.device, self.bytes_per_device))

    def taken(self, device: Device) -> int:
        """Return the bytes that weights and caches take on a device."""
        name = device_name(device)
        return self.bytes_per_device.get(name, 0) + self.cache_per_device.get(name, 0)


@dataclass(frozen=True)
class PlacementProblem:
    """The models to place, and what their placement depends on in the machine and the run.

    Attributes:
        models: the sketch of the target and, after it, the sketch of a draft model or head if there is one.
        settings: the placement settings, for both models.
        free: the free bytes of each usable GPU, and of main memory (`"cpu"`). Without a GPU everything is placed on the
            CPU.
        demand: the settings of the run on which the sizes of caches depend.
    """

    models: tuple[Sketch, ...]
    settings: PlacementSettings
    free: Memory
    demand: Demand

    def with_models(self, sketches: Iterable[Sketch]) -> PlacementProblem:
        """Return the problem in which these sketches replace the sketches with the same roles."""
        by_role = {sketch.role: sketch for sketch in (*self.models, *sketches)}
        return replace(self, models=tuple(by_role.values()))

    @property
    def gpus(self) -> list[int]:
        """All GPUs of the machine."""
        return sorted(device for device in self.free if isinstance(device, int))

    @property
    def room(self) -> dict[Device, int]:
        """The bytes that may be filled on each device: the free bytes and, on a GPU, minus the reserve."""
        room = dict(self.free)
        for gpu in self.gpus:
            room[gpu] = max(0, room[gpu] - self.reserve_bytes)
        return room

    @property
    def reserve_bytes(self) -> int:
        """The bytes that are kept free on each GPU: the reserve of the settings or, if it is larger, the memory that
        reading the prompts needs (`prompt_bytes`).
        """
        return max(self._set_reserve, self.prompt_bytes)

    @property
    def _set_reserve(self) -> int:
        """`placement.reserve_gb` in bytes. For a server, if the user did not change this setting, llama.cpp's own
        default margin (`--fit-target`), 1 GiB.
        """
        if self.is_served and self.settings.reserve_gb == PlacementSettings.reserve_gb:
            return 2**30
        return int(self.settings.reserve_gb * 1e9)

    @property
    def whole_room(self) -> int:
        """The bytes that weights and requests' caches can use on all devices of the run together: the free bytes, minus
        the reserve of the settings on each GPU.
        """
        free = sum(self.free[device] for device in self.devices)
        return free - self._set_reserve * len(self.run_gpus)

    @property
    def prompt_bytes(self) -> int:
        """The estimated number of bytes that reading all prompts needs in addition to weights and caches.

        Each model needs memory for the activations of one layer, and for the logits after each prompt, which exist in
        the model's dtype and in float32. The models read the prompts one after the other, so the larger estimate
        counts.
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
        """The GPUs of the run: the first `placement.gpus` of the machine, or all if this is None. Empty for
        `placement.strategy=cpu`. If the target's own settings state a number of GPUs, all GPUs of the machine:
        `_roomiest` then chooses among them.
        """
        if self.settings.strategy == "cpu":
            return []
        if self.models[0].settings.gpus:
            return self.gpus
        return self.gpus[: self.settings.gpus]

    @property
    def devices(self) -> Sequence[Device]:
        """The GPUs of the run, or the CPU."""
        return self.run_gpus or ["cpu"]

    def cache_sizes(self, sketch: Sketch) -> list[int]:
        """Return the largest number of bytes of each layer's cache, for all rows together."""
        demand = self.demand
        num_rows = demand.batch_size
        if sketch.is_served:
            return [num_rows * size for size in sketch.row_sizes(demand.row_tokens)]
        if sketch.state_bytes:
            # With a draft, there are two copies of each row's state: one from before the draft tokens, and one after.
            num_copies = num_rows * (2 if demand.num_draft_tokens else 1)
            return sketch.cache_sizes(num_copies * demand.row_tokens, num_copies)
        num_tokens = demand.runner_tokens
        if sketch.is_head:
            num_tokens = demand.head_tokens(sketch.block_size)
        return sketch.cache_sizes(num_rows * num_tokens, num_states=0)

    @property
    def cache_bytes(self) -> int:
        """The largest number of bytes of the caches of all models together."""
        return sum(sum(self.cache_sizes(sketch)) for sketch in self.models)

    def placed(self, sketch: Sketch, device_map: DeviceMap) -> Placement:
        """Return a model's placement with this device map. Raises KeyError if the map has no device for a tensor."""
        weights: Counter[str] = Counter()
        caches: Counter[str] = Counter()
        for tensor in sketch.tensors:
            device = device_map[owning_module(tensor.name, device_map)]
            weights[device_name(device)] += sketch.tensor_bytes(tensor)
        for cache, size in zip(sketch.caches, self.cache_sizes(sketch), strict=True):
            device = device_map[owning_module(cache.module, device_map)]
            caches[device_name(device)] += size
        used = {device: size for device, size in caches.items() if size}
        return Placement(device_map, dict(weights), used)

    @property
    def is_served(self) -> bool:
        """Whether the models are in a server (`as_served`). If not, they are in this program's own decoding loop."""
        return any(sketch.is_served for sketch in self.models)

    @property
    def program(self) -> str:
        """The name of the program that holds the models, for messages."""
        if self.is_served:
            return "a server that reads the GGUF file"
        return "harness's own decoding loop"

    def misfit(self) -> Misfit:
        """Return the error to raise if the models do not fit."""
        names = " with ".join(f"{sketch.role}={sketch.settings.name}" for sketch in self.models)
        sizes = [amount(sketch.weight_bytes) for sketch in self.models]
        needed = f"weights need {' + '.join(sizes)}"
        if self.cache_bytes:
            needed += f" and KV caches {amount(self.cache_bytes)}"
        # The devices that `_choices` tries last: as many as the target's own settings state, otherwise all.
        own_number = self.models[0].settings.gpus or len(self.devices)
        devices = _roomiest(self.devices, self.room, own_number)
        rooms = " + ".join(amount(self.room[device]) for device in devices)
        if not self.run_gpus:
            free = f"{rooms} of main memory are free"
        else:
            count = "one GPU has" if len(devices) == 1 else f"{len(devices)} GPUs have"
            reserve = "placement.reserve_gb"
            if self.prompt_bytes > self.settings.reserve_gb * 1e9:
                reserve = f"the {amount(self.reserve_bytes)} that reading the prompts needs"
            free = f"{count} {rooms} free beyond {reserve}"
        return Misfit(f"{names} does not fit in {self.program}: {needed}, {free}")


def fit(problem: PlacementProblem) -> list[Placement]:
    """Place the target and the draft. Returns one placement per model, in the order of the problem's models.

    With `placement.strategy=balanced` the target is spread over all GPUs of the run. If the target's own settings state
    a number of GPUs, the target is spread over this many GPUs: those with the most room.

    Raises:
        Misfit: the models do not fit.
    """
    for devices, num_target_devices in _choices(problem):
        if placements := _place(problem, devices, num_target_devices):
            return placements
    raise problem.misfit()


def _choices(problem: PlacementProblem) -> Iterator[tuple[Sequence[Device], int]]:
    """Yield the choices to try, the best first. A choice consists of the devices for all models together, and the
    number of these devices that the target gets. Fewer devices are better; with equally many devices, fewer for the
    target are better.
    """
    devices = problem.devices
    settings = problem.settings
    own_number = problem.models[0].settings.gpus
    if settings.strategy != "auto" or own_number:
        yield devices, own_number or len(devices)
        return
    for number in range(1, len(devices) + 1):
        for num_target_devices in range(1, number + 1):
            yield _roomiest(devices, problem.room, number), num_target_devices


def _place(
    problem: PlacementProblem, devices: Sequence[Device], num_target_devices: int
) -> list[Placement] | None:
    """Place the draft whole on one device, and then the target in the remaining room. Return None if one of them does
    not fit.
    """
    if len(devices) > 1:
        # A head may then be on another GPU than the target, with copies of those matrices of the target that it uses.
        # Room is kept for them in any case.
        models = [
            replace(sketch, tensors=(*sketch.tensors, *sketch.copied_tensors))
            for sketch in problem.models
        ]
        problem = replace(problem, models=tuple(models))
    room = {device: problem.room[device] for device in devices}
    target, *drafts = problem.models
    placements = []
    for draft in drafts:
        # If several GPUs have equal room, the draft is placed on the last one, because the target begins on the first.
        home = max(reversed(room), key=room.__getitem__)
        placement = problem.placed(draft, {"": home})
        room[home] -= placement.taken(home)
        if room[home] < 0:
            return None
        placements.append(placement)
    chosen = _roomiest(devices, room, num_target_devices)
    for device_map in _maps(problem, target, {device: room[device] for device in chosen}):
        placement = problem.placed(target, device_map)
        if all(placement.taken(device) <= room[device] for device in chosen):
            return [placement, *placements]
    return None


def _maps(problem: PlacementProblem, sketch: Sketch, room: Memory) -> Iterator[DeviceMap]:
    """Yield device maps that spread a model over these devices, the most even one first. Yields nothing if the model
    cannot be divided, or does not fit.
    """
    if len(room) == 1:
        [device] = room
        yield {"": device}
        return
    caches = problem.cache_sizes(sketch)
    if sketch.weight_bytes + sum(caches) > sum(room.values()):
        return
    if sketch.is_served and sketch.settings.gguf_file:
        yield _map_of_file(sketch, room)
        return
    # accelerate cannot divide a model that does not name the modules to be kept whole.
    kept_whole = list(getattr(sketch.model, "_no_split_modules", None) or ())
    if not kept_whole:
        return
    model = copy.deepcopy(sketch.model)
    assert model is not None  # only a head has no model, and a head is never divided
    # accelerate adds up the bytes of a model's tensors. So that it uses the right sizes, each tensor is replaced by one
    # that has as many bytes as the loaded tensor will have, and each cache becomes a buffer of the model.
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    for tensor in sketch.tensors:
        size = sketch.tensor_bytes(tensor)
        tensors[tensor.name].requires_grad_(False).data = _bytes(size)
    for number, (cache, size) in enumerate(zip(sketch.caches, caches, strict=True)):
        model.get_submodule(cache.module).register_buffer(f"cache_{number}", _bytes(size))
    # First with equal shares for all devices, then with all room of each device.
    for limits in (get_balanced_memory(model, dict(room), kept_whole), room):
        # accelerate keeps room for one layer free on the first device. It does so on an imaginary first GPU without any
        # room, so that all room of the real GPUs is used.
        device_map = infer_auto_device_map(
            model, {-1: 0, **limits}, kept_whole, clean_result=False, offload_buffers=True
        )
        # accelerate moves to `disk` what has no room on any device.
        has_room_for_all = "disk" not in device_map.values()
        if has_room_for_all:
            yield device_map


def _map_of_file(sketch: Sketch, room: Memory) -> DeviceMap:
    """Return a device map that divides a GGUF file as llama.cpp does: the layers in proportion to the room on each GPU,
    the embedding on the first GPU, and everything else, such as the output matrix, on the last GPU.

    The output matrix counts as one more layer. If one GPU has twice the room of the next one, and there are 5 layers,
    the first GPU gets 4 of them, and the second one gets the last layer and the output matrix.
    """
    layers = [cache.module for cache in sketch.caches]
    first, *_, last = room
    # `owning_module` finds the innermost of these names. "" stands for everything that the others do not name.
    devices: dict[str, Device] = {"": last, "token_embd": first}
    # If the rooms were laid end to end, the room of each GPU would end here: 2 and 3 for rooms of 2 and 1.
    ends = [*itertools.accumulate(room.values())]
    for number, layer in enumerate(layers):
        index = bisect.bisect_right(ends, number / (len(layers) + 1) * ends[-1])
        devices[layer] = [*room][index]
    return devices


def _bytes(number: int) -> torch.Tensor:
    return torch.empty(number, dtype=torch.uint8, device="meta")


def _roomiest(devices: Sequence[Device], room: Memory, count: int) -> list[Device]:
    """Return the `count` devices with the most room, in their original order. If devices have equal room, the first
    ones are taken.
    """
    by_room = sorted(devices, key=room.__getitem__, reverse=True)
    return [device for device in devices if device in by_room[:count]]


# Advice for models that do not fit: settings with which they would fit, as the user types them -------


def fit_or_explain(problem: PlacementProblem, *, force: bool = False) -> list[Placement]:
    """Place the models as `fit` does. If they do not fit and `force` is True, place them as `fit_regardless` does.

    Raises:
        RunError: the models do not fit, and `force` is False. The message says how much memory they need, how much is
            free, and which settings would fit.
    """
    try:
        return fit(problem)
    except Misfit as misfit:
        if force:
            return fit_regardless(problem)
        texts = ", ".join(map(str, remedies(problem)))
        advice = f"what would fit: {texts}" if texts else needed_instead(problem)
        raise RunError(f"{misfit}\n{advice} (force=true tries anyway)") from None


def fit_regardless(problem: PlacementProblem) -> list[Placement]:
    """Place the models on the devices of the run, as if each device had more memory than any machine has: with the
    strategy `auto`, on all of them, unless a model cannot be divided.
    """
    roomy = replace(problem, free=dict.fromkeys(problem.free, 10**15))
    settings = problem.settings
    if settings.strategy == "auto":
        with suppress(Misfit):
            return fit(replace(roomy, settings=replace(settings, strategy="balanced")))
    return fit(roomy)


def remedies(problem: PlacementProblem) -> list[Remedy]:
    """Return changes of the settings or of the machine, each of which alone would make the models fit; empty if there
    are none.
    """
    return [*_smaller_batch(problem), *_fewer_bits(problem), *_more_gpus(problem)]


def needed_instead(problem: PlacementProblem) -> str:
    """Return a sentence about what is needed if no change of settings makes the models fit."""
    num_bytes = sum(sketch.weight_bytes for sketch in problem.models)
    if num_bytes <= problem.whole_room:
        return "the weights alone fit: shorter prompts or answers are needed"
    if num_bytes <= sum(problem.free[device] for device in problem.devices):
        return (
            "the weights fit only without the reserve on each GPU, which placement.reserve_gb= sets"
        )
    return "the weights alone do not fit: a smaller model is needed"


def _fits(problem: PlacementProblem) -> bool:
    """Whether a changed setting is worth advising: the models fit, and are a pair."""
    target, *drafts = problem.models
    # A changed setting may turn the draft into the same model as the target, such as 65B_4bit with 65B_4bit. Two equal
    # models are no pair.
    if any(draft.model and draft.settings.is_same(target.settings) for draft in drafts):
        return False
    with suppress(Misfit):
        fit(problem)
        return True
    return False


def _smaller_batch(problem: PlacementProblem) -> list[Remedy]:
    """Return the largest batch size that fits, as a list of one remedy; an empty list if no batch size fits."""

    def is_too_large(batch_size: int) -> bool:
        demand = replace(problem.demand, batch_size=batch_size)
        return not _fits(replace(problem, demand=demand))

    # Batches of 1, 2, … rows fit, up to the largest one that fits. So the number of batch sizes that fit is the largest
    # of them.
    rows = bisect.bisect_left(range(1, problem.demand.batch_size), True, key=is_too_large)
    return [Remedy(f"batch_size={rows}")] if rows else []


def _fewer_bits(problem: PlacementProblem) -> list[Remedy]:
    """Return all quantizations of a single model that make the models fit, those of the draft first. If there are none,
    return the quantizations of both models together that make them fit.
    """
    for number in range(1, len(problem.models) + 1):
        enough = []
        for sketches in reversed([*itertools.combinations(problem.models, number)]):
            for quantization in _QUANTIZATIONS:
                smaller = [_changed(sketch, "quantization", quantization) for sketch in sketches]
                # Without bitsandbytes, and if weights are stored quantized, a model does not become smaller.
                helps = all(
                    new.weight_bytes < old.weight_bytes
                    for new, old in zip(smaller, sketches, strict=True)
                )
                if helps and _fits(problem.with_models(smaller)):
                    texts = [_as_typed(sketch, "quantization", quantization) for sketch in smaller]
                    size = sum(sketch.weight_bytes for sketch in smaller)
                    enough.append(Remedy(" ".join(texts), amount(size)))
        if enough:
            return enough
    return []


def _more_gpus(problem: PlacementProblem) -> list[Remedy]:
    """Return the smallest number of GPUs for the target with which the models fit, as a list of one remedy; an empty
    list if up to `_MOST_GPUS` GPUs are not enough, or if the run uses no GPU.

    A GPU that the machine does not have is assumed to have as much free memory as the machine's GPU with the most.
    """
    if not problem.run_gpus:
        return []
    room = max(problem.free[gpu] for gpu in problem.gpus)
    for count in range(2, _MOST_GPUS + 1):
        spread = _changed(problem.models[0], "gpus", count)
        machine = replace(problem, free={**dict.fromkeys(range(count), room), **problem.free})
        if _fits(machine.with_models([spread])):
            num_needed = count if count > len(problem.gpus) else None
            return [Remedy(_as_typed(spread, "gpus", count), num_gpus=num_needed)]
    return []


def _changed(sketch: Sketch, setting: Literal["quantization", "gpus"], value: Any) -> Sketch:
    """Return the sketch of a model, with another value for one of the model's settings."""
    settings = replace(sketch.settings, **{setting: value})
    return replace(sketch, settings=settings, quantization=settings.quantization)


def _as_typed(sketch: Sketch, setting: Literal["quantization", "gpus"], value: object) -> str:
    """Return a changed setting of a model as the user types it: `model=65B_4bit` or `model=65B_4GPUs` for a preset, and
    `model.quantization=4bit` for a repository (`org/model`), because suffixes cannot be added to its name.
    """
    name = sketch.settings.name
    if "/" in name:
        return f"{sketch.role}.{setting}={value}"
    suffix = f"{value}GPUs" if setting == "gpus" else value
    return f"{sketch.role}={canonical_name(f'{name}_{suffix}')}"
