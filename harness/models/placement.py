"""Where the layers go, decided before any weights load.

All of it is arithmetic on models without memory and on the bytes that are free, so that any machine can be pretended.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from accelerate import infer_auto_device_map
from accelerate.utils import check_device_map, compute_module_sizes, get_balanced_memory
from torch import nn
from transformers import PreTrainedModel

from harness.config.errors import RunError, SettingError
from harness.config.settings import PlacementSettings, Quantization
from harness.models.checkpoints import Checkpoint
from harness.models.memory import cache_bytes_per_device
from harness.models.quantization import stored_quantization
from harness.models.sizes import DeviceMap, bytes_per_device, device_name, empty_model
from harness.models.tensor_parallel import bytes_per_rank, check_plain, check_split, splits_cache, world

# Bytes by device: a GPU's index or "cpu".
Memory = Mapping[int | str, int]

_ATTEMPTS = 4


@dataclass(frozen=True)
class Placement:
    """Where one model lies.

    Attributes:
        device_map: from module names to a GPU's index, `"cpu"` or `"disk"`; `""` is the whole model.
        bytes_per_device: what weights and buffers take, by `cuda:0`, `cpu` or `disk`.
        cache_per_device: what keys and values will take beside them, where that was asked for.
        num_ranks: processes that hold the model, this one's part of it by `device_map`, all of them by the bytes.
        split: whether each has a part of every layer; otherwise each has a copy.
    """

    device_map: DeviceMap
    bytes_per_device: dict[str, int]
    cache_per_device: dict[str, int] = dataclasses.field(default_factory=dict)
    num_ranks: int = 1
    split: bool = False

    @property
    def devices(self) -> list[torch.device]:
        """Every device that computes layers; what lies on disk computes on the CPU."""
        names = (device_name(device).replace("disk", "cpu") for device in self.device_map.values())
        return [torch.device(name) for name in dict.fromkeys(names)]

    @property
    def offloaded(self) -> bool:
        """Whether some layers lie elsewhere than where they are computed."""
        places = set(self.device_map.values())
        return "disk" in places or ("cpu" in places and len(places) > 1)


def effective_placement(checkpoint: Checkpoint, placement: PlacementSettings) -> PlacementSettings:
    """The run's placement with what the model's own settings override; an explicit map is the target's alone."""
    settings = checkpoint.settings
    device_map = placement.device_map if checkpoint.role == "model" else None
    strategy = placement.strategy_for(checkpoint.role, settings)
    if device_map is not None and not any(isinstance(_parse_device(d), int) for d in device_map.values()):
        strategy = "cpu"
    return dataclasses.replace(
        placement, strategy=strategy, gpus=settings.gpus or placement.gpus, device_map=device_map
    )


@dataclass(frozen=True)
class Candidate:
    """A model that wants a place.

    Attributes:
        dtype: of what is not quantized.
        cache: bytes of its keys and values, a layer each; empty where the reserve is to be room enough.
    """

    checkpoint: Checkpoint
    dtype: torch.dtype
    cache: Sequence[int] = ()

    @functools.cached_property
    def model(self) -> PreTrainedModel:
        """On the meta device, as large as the loaded one will be."""
        return empty_model(self.checkpoint, self.dtype, applied_quantization(self.checkpoint))

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights and buffers."""
        return int(compute_module_sizes(self.model)[""])


@dataclass(frozen=True)
class Misfit:
    """A model that found no place: what it asked for, what it was offered, and what caches take before that.

    Attributes:
        num_ranks: over how many processes it was to be split.
    """

    candidate: Candidate
    placement: PlacementSettings
    budget: Memory
    cache_bytes: int = 0
    num_ranks: int = 1


def try_pair(
    target: Candidate, draft: Candidate | None, placement: PlacementSettings, free: Memory
) -> tuple[Placement, Placement | None] | Misfit:
    """Place the target, and the draft on what it leaves, by preference on one device.

    Each GPU keeps free what its part of the caches takes, and the reserve at least; main memory has no reserve.

    Args:
        target: placed first.
        draft: None for the target alone, or where both are the same weights.
        placement: the run's; the models' own settings override it.
        free: what is free on each GPU and, as `"cpu"`, in main memory. Without a GPU everything goes to the CPU.

    Raises:
        SettingError, RunError: an explicit map that does not suit the model or the machine.
    """
    reserve = int(placement.reserve_gb * 1e9)
    if (num_ranks := _num_ranks(target, draft, placement, free)) > 1:
        return _place_on_ranks(target, draft, placement, free, num_ranks)
    held = _cache_guess(target, draft, placement, free)
    # Where the caches lie follows from where the layers do, and the room for the layers from the caches.
    for _ in range(_ATTEMPTS):
        budget = {d: max(0, n - max(held.get(d, 0), reserve if isinstance(d, int) else 0)) for d, n in free.items()}
        placed = _place_both(target, draft, placement, budget, free)
        if isinstance(placed, Misfit):
            return dataclasses.replace(placed, cache_bytes=sum(held.values()))
        held = {d: sum(p.cache_per_device.get(device_name(d), 0) for p in placed if p is not None) for d in free}
        taken = {d: sum(p.bytes_per_device.get(device_name(d), 0) for p in placed if p is not None) for d in free}
        if all(not held[d] or taken[d] + held[d] <= n for d, n in free.items()):
            return placed
    last = draft or target
    return Misfit(last, effective_placement(last.checkpoint, placement), budget, sum(held.values()))


def _cache_guess(target: Candidate, draft: Candidate | None, placement: PlacementSettings, free: Memory) -> Memory:
    """The bytes of both caches, spread as layers are by default: over the GPUs, by what is free on each."""
    total = sum(target.cache) + (sum(draft.cache) if draft is not None else 0)
    devices = gpus_of(free, placement) or {"cpu": free["cpu"]}
    whole = sum(devices.values()) or 1
    return {device: total * n // whole for device, n in devices.items()}


def _num_ranks(target: Candidate, draft: Candidate | None, placement: PlacementSettings, free: Memory) -> int:
    """Over how many processes a model is split: over those that run, or that would on a machine with these GPUs."""
    for candidate in filter(None, (target, draft)):
        effective = effective_placement(candidate.checkpoint, placement)
        if effective.strategy == "tensor_parallel":
            running = world().size
            return running if running > 1 else len(gpus_of(free, effective)) or effective.gpus or 1
    return 1


def _place_on_ranks(
    target: Candidate, draft: Candidate | None, placement: PlacementSettings, free: Memory, num_ranks: int
) -> tuple[Placement, Placement | None] | Misfit:
    """Every rank alike: its part of what is split, a copy of what is not, and on a GPU of its own if there are GPUs.

    Raises:
        SettingError: a model that cannot be split.
    """
    reserve = int(placement.reserve_gb * 1e9)
    candidates = [target] if draft is None else [target, draft]
    effective = [effective_placement(candidate.checkpoint, placement) for candidate in candidates]
    placed = [
        _place_on_each_rank(candidate, how, num_ranks, on_gpus=bool(gpus_of(free, how)))
        for candidate, how in zip(candidates, effective, strict=True)
    ]
    held = {d: sum(p.cache_per_device.get(device_name(d), 0) for p in placed) for d in free}
    budget = {d: max(0, n - max(held[d], reserve if isinstance(d, int) else 0)) for d, n in free.items()}
    for candidate, how, one in zip(candidates, effective, placed, strict=True):
        left = {d: n - one.bytes_per_device.get(device_name(d), 0) for d, n in budget.items()}
        if min(left.values()) < 0:
            return Misfit(candidate, how, budget, sum(held.values()), num_ranks)
        budget = left
    return placed[0], placed[1] if draft is not None else None


def _place_on_each_rank(
    candidate: Candidate, placement: PlacementSettings, num_ranks: int, *, on_gpus: bool
) -> Placement:
    settings, role = candidate.checkpoint.settings, candidate.checkpoint.role
    split = placement.strategy == "tensor_parallel"
    only, what = (num_ranks, "a part") if split else (1, "a copy")
    if settings.gpus not in (None, only):
        raise SettingError(f"{role}.gpus", f"must be {only} where {num_ranks} ranks hold {what} each", settings.gpus)
    if split:
        check_plain(candidate.checkpoint)
    size, cache = candidate.weight_bytes, sum(candidate.cache)
    if split:
        check_split(candidate.checkpoint, candidate.model, num_ranks)
        size = bytes_per_rank(candidate.model, num_ranks)
        cache = cache // num_ranks if splits_cache(candidate.model) else cache
    # Main memory holds what all ranks have.
    devices, times = ([f"cuda:{n}" for n in range(num_ranks)], 1) if on_gpus else (["cpu"], num_ranks)
    return Placement(
        {"": world().rank if on_gpus else "cpu"},
        dict.fromkeys(devices, times * size),
        dict.fromkeys(devices, times * cache) if cache else {},
        num_ranks,
        split,
    )


def _place_both(
    target: Candidate, draft: Candidate | None, placement: PlacementSettings, budget: Memory, free: Memory
) -> tuple[Placement, Placement | None] | Misfit:
    if placement.device_map is None:
        placed = _place_candidate(target, placement, budget)
    else:
        placed = _place_explicitly(target, placement.device_map, free)
    if draft is None or isinstance(placed, Misfit):
        return placed if isinstance(placed, Misfit) else (placed, None)
    left = {device: max(0, n - placed.bytes_per_device.get(device_name(device), 0)) for device, n in budget.items()}
    beside = _place_candidate(draft, placement, left)
    return beside if isinstance(beside, Misfit) else (placed, beside)


def place(
    model: PreTrainedModel, budget: Memory, placement: PlacementSettings, *, whole_if_possible: bool = False
) -> DeviceMap | None:
    """The device map of `model`, or None where it does not fit.

    `balanced` and `auto` spread it evenly (accelerate's `get_balanced_memory`), `sequential` fills one GPU after the
    other, `single` takes the GPU with the most room. Evenly is a wish: where the GPUs differ too much, they are filled
    in turn.

    Args:
        model: from `empty_model`.
        budget: bytes that may be used.
        placement: strategy, number of GPUs and whether layers may be offloaded.
        whole_if_possible: keep the model on one GPU where one has room for it, whatever the strategy.
    """
    gpus = gpus_of(budget, placement)
    size = compute_module_sizes(model)[""]
    if gpus:
        roomiest = max(gpus, key=lambda gpu: gpus[gpu])
        if placement.strategy == "single" or not _indivisible(model):
            gpus = {roomiest: gpus[roomiest]}
        if size <= gpus[roomiest] and (whole_if_possible or len(gpus) == 1):
            return {"": roomiest}
    elif size <= budget["cpu"]:
        return {"": "cpu"}
    for limits in _limits(model, gpus, budget["cpu"], placement):
        with warnings.catch_warnings():
            # About buffers of layers that spill over; a map that spills where it must not is thrown away below.
            warnings.simplefilter("ignore")
            device_map = dict(infer_auto_device_map(model, dict(limits), _indivisible(model)))
        used = bytes_per_device(model, device_map)
        allowed = {
            device_name(device): n for device, n in (gpus | {d: limits[d] for d in limits if d == "cpu"}).items()
        }
        if placement.offload == "disk":
            allowed["disk"] = size
        if all(n <= allowed.get(device, 0) for device, n in used.items()):
            return device_map
    return None


def _limits(
    model: PreTrainedModel, gpus: dict[int | str, int], main_memory: int, placement: PlacementSettings
) -> Iterator[dict[int | str, int]]:
    """Bytes to give accelerate on each device, to be tried in turn; layers go outside the GPUs only as the last try."""
    if gpus:
        if placement.strategy in ("balanced", "auto") and len(gpus) > 1:
            yield get_balanced_memory(model, dict(gpus), no_split_module_classes=_indivisible(model))
        # accelerate keeps room on the first GPU to bring in one layer from outside. No layer is outside, so it may be
        # given back; it can be too much where the largest layer comes early, hence the second try.
        first = min(gpus)
        yield {**gpus, first: gpus[first] + largest_block(model)}
        yield gpus
    if placement.offload == "cpu" and gpus:
        yield {**gpus, "cpu": main_memory}
    elif placement.offload == "disk" and not gpus:
        yield {"cpu": main_memory}


def _place_candidate(candidate: Candidate, placement: PlacementSettings, budget: Memory) -> Placement | Misfit:
    checkpoint, settings = candidate.checkpoint, candidate.checkpoint.settings
    placement = effective_placement(checkpoint, placement)
    if settings.gpus is not None:
        # A model's own count does not say which: what another model left is not always on the first.
        roomiest = sorted(gpus_of(budget), key=lambda gpu: (-budget[gpu], gpu))[: settings.gpus]
        budget = {device: n for device, n in budget.items() if device in roomiest or device == "cpu"}
    # A draft is kept whole unless its own settings say how it is to be split.
    whole = checkpoint.role == "draft" and settings.placement is None and settings.gpus is None
    device_map = place(candidate.model, budget, placement, whole_if_possible=whole)
    if device_map is not None:
        placed = _placed(candidate, device_map)
        # Layers that are offloaded are not quantized, and may be too large after all.
        if placed.bytes_per_device.get("cpu", 0) <= budget["cpu"]:
            return placed
    return Misfit(candidate, placement, budget)


def _place_explicitly(candidate: Candidate, given: Mapping[str, object], free: Memory) -> Placement:
    """The map the user gave, once it is known to suit the model and the machine."""
    setting, checkpoint, model = "placement.device_map", candidate.checkpoint, candidate.model
    device_map = {str(module): _parse_device(device) for module, device in given.items()}
    for device in device_map.values():
        if device not in free and device != "disk":
            known = ", ".join([*map(str, free), "disk"])
            raise SettingError(setting, f"must name devices of this machine ({known})", device)
    modules = dict(model.named_modules())
    if unknown := [module for module in device_map if module not in modules]:
        raise SettingError(setting, f"must name modules of {type(model).__name__}", unknown[0])
    try:
        check_device_map(model, device_map)
    except ValueError as exception:
        uncovered = str(exception).partition(": ")[2].split(", ")[0]
        raise SettingError(setting, f"must cover the whole model; {uncovered} lies nowhere") from exception
    placed = _placed(candidate, device_map)
    for name, taken in placed.bytes_per_device.items():
        available = free.get(_parse_device(name), math.inf)
        if taken > available:
            wanted = f"{in_gb(taken)} of {checkpoint.settings.name} on {name}"
            raise RunError(f"{checkpoint.role}: {setting} puts {wanted}, and {in_gb(available)} are free there")
    return placed


def _placed(candidate: Candidate, device_map: DeviceMap) -> Placement:
    checkpoint, model = candidate.checkpoint, candidate.model
    caches = cache_bytes_per_device(model, device_map, candidate.cache)
    placed = Placement(device_map, bytes_per_device(model, device_map), caches)
    if not placed.offloaded:
        return placed
    if stored_quantization(checkpoint.config) is not None:
        rule = f"parts of {checkpoint.settings.name} cannot lie outside the GPUs: its weights are quantized already"
        raise SettingError("placement", rule)
    quantization = applied_quantization(checkpoint)
    if quantization != "none":
        # What bitsandbytes offloads it does not quantize.
        model = empty_model(checkpoint, candidate.dtype, quantization, device_map)
    return Placement(device_map, bytes_per_device(model, device_map), caches)


def applied_quantization(checkpoint: Checkpoint) -> Quantization:
    """What bitsandbytes has to do while loading: nothing where the stored weights are quantized already."""
    return "none" if stored_quantization(checkpoint.config) is not None else checkpoint.settings.quantization


def gpus_of(budget: Memory, placement: PlacementSettings | None = None) -> dict[int | str, int]:
    """The GPUs of `budget` that `placement` may use, by index; None for all of them."""
    gpus = sorted((device, n) for device, n in budget.items() if isinstance(device, int))
    if placement is not None:
        gpus = [] if placement.strategy == "cpu" else gpus[: placement.gpus]
    return dict(gpus)


def _indivisible(model: PreTrainedModel) -> list[str]:
    """Class names of the modules that must lie on one device, because of what they add up inside.

    Empty where the model declares none; nobody knows then where it may be split.
    """
    return list(model._no_split_modules or ())


def largest_block(model: PreTrainedModel) -> int:
    indivisible, sizes = _indivisible(model), compute_module_sizes(model)

    def is_block(module: nn.Module) -> bool:
        return type(module).__name__ in indivisible or next(module.children(), None) is None

    return max(int(sizes.get(name, 0)) for name, module in model.named_modules() if is_block(module))


def _parse_device(device: object) -> int | str:
    """`0`, `"0"` and `"cuda:0"` as 0; anything else as it is written."""
    text = str(device).removeprefix("cuda:")
    return int(text) if text.isdigit() else text


def in_gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB"
