"""Where the layers go, decided before any weights load.

All of it is arithmetic on models without memory and on the bytes that are free, so that any machine can be pretended.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from accelerate import infer_auto_device_map
from accelerate.utils import check_device_map, compute_module_sizes, get_balanced_memory
from torch import nn
from transformers import PreTrainedModel

from harness.config.errors import RunError, SettingError
from harness.config.settings import PlacementSettings, Quantization
from harness.models.checkpoints import Checkpoint
from harness.models.quantization import stored_quantization
from harness.models.sizes import DeviceMap, bytes_per_device, device_name, empty_model

# Bytes by device: a GPU's index or "cpu".
Memory = Mapping[int | str, int]


@dataclass(frozen=True)
class Placement:
    """Where one model lies.

    Attributes:
        device_map: from module names to a GPU's index, `"cpu"` or `"disk"`; `""` is the whole model.
        bytes_per_device: what weights and buffers take, by `cuda:0`, `cpu` or `disk`.
    """

    device_map: DeviceMap
    bytes_per_device: dict[str, int]

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
    strategy = settings.placement or placement.strategy
    if device_map is not None and not any(isinstance(_parse_device(d), int) for d in device_map.values()):
        strategy = "cpu"
    return dataclasses.replace(
        placement, strategy=strategy, gpus=settings.gpus or placement.gpus, device_map=device_map
    )


def place_pair(
    target: tuple[Checkpoint, torch.dtype],
    draft: tuple[Checkpoint, torch.dtype] | None,
    placement: PlacementSettings,
    free: Memory,
) -> tuple[Placement, Placement | None]:
    """Place the target, and the draft on what it leaves, by preference on one device.

    Args:
        target: placed first, held in the dtype beside it where it is not quantized.
        draft: likewise; None for the target alone, or where both are the same weights.
        placement: the run's; the models' own settings override it.
        free: what is free on each GPU and, as `"cpu"`, in main memory. Without a GPU everything goes to the CPU.

    Raises:
        RunError: a model does not fit; says what it needs, what is free and what would fit.
        SettingError: an explicit map that does not suit the model or the machine.
    """
    # The reserve is for activations and caches; both models share it.
    reserve = int(placement.reserve_gb * 1e9)
    budget = {device: max(0, n - reserve) if isinstance(device, int) else n for device, n in free.items()}
    if placement.device_map is None:
        placed = _place_checkpoint(*target, placement, budget)
    else:
        placed = _place_explicitly(*target, placement.device_map, free)
    if draft is None:
        return placed, None
    left = {device: max(0, n - placed.bytes_per_device.get(device_name(device), 0)) for device, n in budget.items()}
    return placed, _place_checkpoint(*draft, placement, left)


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
    gpus = _gpus(budget, placement)
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
        yield {**gpus, first: gpus[first] + _largest_block(model)}
        yield gpus
    if placement.offload == "cpu" and gpus:
        yield {**gpus, "cpu": main_memory}
    elif placement.offload == "disk" and not gpus:
        yield {"cpu": main_memory}


def _place_checkpoint(
    checkpoint: Checkpoint, dtype: torch.dtype, placement: PlacementSettings, budget: Memory
) -> Placement:
    settings, quantization = checkpoint.settings, applied_quantization(checkpoint)
    placement = effective_placement(checkpoint, placement)
    if settings.gpus is not None:
        # A model's own count does not say which: what another model left is not always on the first.
        roomiest = sorted(_gpus(budget), key=lambda gpu: (-budget[gpu], gpu))[: settings.gpus]
        budget = {device: n for device, n in budget.items() if device in roomiest or device == "cpu"}
    model = empty_model(checkpoint, dtype, quantization)
    # A draft is kept whole unless its own settings say how it is to be split.
    whole = checkpoint.role == "draft" and settings.placement is None and settings.gpus is None
    device_map = place(model, budget, placement, whole_if_possible=whole)
    if device_map is not None:
        placed = _placed(checkpoint, dtype, model, device_map)
        # Layers that are offloaded are not quantized, and may be too large after all.
        if placed.bytes_per_device.get("cpu", 0) <= budget["cpu"]:
            return placed
    raise RunError(_does_not_fit(checkpoint, dtype, model, placement, budget))


def _place_explicitly(
    checkpoint: Checkpoint, dtype: torch.dtype, given: Mapping[str, object], free: Memory
) -> Placement:
    """The map the user gave, once it is known to suit the model and the machine."""
    setting = "placement.device_map"
    device_map = {str(module): _parse_device(device) for module, device in given.items()}
    for device in device_map.values():
        if device not in free and device != "disk":
            known = ", ".join([*map(str, free), "disk"])
            raise SettingError(setting, f"must name devices of this machine ({known})", device)
    model = empty_model(checkpoint, dtype, applied_quantization(checkpoint))
    modules = dict(model.named_modules())
    if unknown := [module for module in device_map if module not in modules]:
        raise SettingError(setting, f"must name modules of {type(model).__name__}", unknown[0])
    try:
        check_device_map(model, device_map)
    except ValueError as exception:
        uncovered = str(exception).partition(": ")[2].split(", ")[0]
        raise SettingError(setting, f"must cover the whole model; {uncovered} lies nowhere") from exception
    placed = _placed(checkpoint, dtype, model, device_map)
    for name, taken in placed.bytes_per_device.items():
        available = free.get(_parse_device(name), math.inf)
        if taken > available:
            wanted = f"{_gb(taken)} of {checkpoint.settings.name} on {name}"
            raise RunError(f"{checkpoint.role}: {setting} puts {wanted}, and {_gb(available)} are free there")
    return placed


def _placed(checkpoint: Checkpoint, dtype: torch.dtype, model: PreTrainedModel, device_map: DeviceMap) -> Placement:
    placed = Placement(device_map, bytes_per_device(model, device_map))
    if not placed.offloaded:
        return placed
    if stored_quantization(checkpoint.config) is not None:
        rule = f"parts of {checkpoint.settings.name} cannot lie outside the GPUs: its weights are quantized already"
        raise SettingError("placement", rule)
    quantization = applied_quantization(checkpoint)
    if quantization != "none":
        # What bitsandbytes offloads it does not quantize.
        model = empty_model(checkpoint, dtype, quantization, device_map)
    return Placement(device_map, bytes_per_device(model, device_map))


def applied_quantization(checkpoint: Checkpoint) -> Quantization:
    """What bitsandbytes has to do while loading: nothing where the stored weights are quantized already."""
    return "none" if stored_quantization(checkpoint.config) is not None else checkpoint.settings.quantization


def _does_not_fit(
    checkpoint: Checkpoint, dtype: torch.dtype, model: PreTrainedModel, placement: PlacementSettings, budget: Memory
) -> str:
    """What it needs, what is free, what would fit; two lines."""
    role, settings, quantization = checkpoint.role, checkpoint.settings, applied_quantization(checkpoint)
    needed = compute_module_sizes(model)[""]
    gpus = _gpus(budget, placement)
    if placement.strategy == "single" and gpus:
        gpus = dict([max(gpus.items(), key=lambda item: item[1])])
    if not gpus:
        room = f"{_gb(budget['cpu'])} of main memory are free"
    else:
        count = "one GPU has" if len(gpus) == 1 else f"{len(gpus)} GPUs have"
        room = f"{count} {' + '.join(_gb(n) for n in gpus.values())} free beyond placement.reserve_gb"
    held = str(dtype).removeprefix("torch.") if quantization == "none" else quantization
    after = " beside the model" if role == "draft" else ""
    lines = [f"{role}: {settings.name} does not fit{after}: its weights need {_gb(needed)} in {held}, {room}"]

    def fits(other: PreTrainedModel, among: Memory = budget, how: PlacementSettings = placement) -> bool:
        return place(other, among, how) is not None

    remedies = []
    if not gpus and dtype == torch.float32 and quantization == "none":
        smaller = empty_model(checkpoint, torch.bfloat16)
        if fits(smaller):
            remedies.append(f"dtype=bfloat16 ({_gb(compute_module_sizes(smaller)[''])})")
    if quantization == "none" and stored_quantization(checkpoint.config) is None and settings.gguf_file is None:
        others: tuple[Quantization, ...] = ("8bit", "4bit")
        for other in others:
            # Without bitsandbytes there is no such remedy.
            with contextlib.suppress(ImportError):
                smaller = empty_model(checkpoint, dtype, other)
                if fits(smaller):
                    remedies.append(f"{role}.quantization={other} ({_gb(compute_module_sizes(smaller)[''])})")
    if gpus:
        spread = dataclasses.replace(placement, strategy="balanced", gpus=None)
        if len(_gpus(budget)) > len(gpus) and fits(model, how=spread):
            remedies.append("spread over all GPUs (placement.strategy=balanced, no limit on gpus)")
        elif (enough := _enough_gpus(model, max(gpus.values()), spread)) is not None:
            remedies.append(f"{enough} GPUs with as much free")
        if placement.offload == "none" and fits(model, how=dataclasses.replace(placement, offload="cpu")):
            remedies.append("placement.offload=cpu (slow)")
    lines.append(f"what would fit: {', '.join(remedies)}" if remedies else "a smaller model is needed")
    return "\n".join(lines)


def _enough_gpus(model: PreTrainedModel, room: int, placement: PlacementSettings) -> int | None:
    """How many GPUs with `room` bytes each it takes at least to hold the model; None where none can hold a layer."""
    if room <= _largest_block(model):
        return None
    least = math.ceil(compute_module_sizes(model)[""] / room)
    # Layers do not divide: some more than the bytes alone ask for may be needed.
    candidates = range(least, 2 * least + 2)
    return next((n for n in candidates if place(model, dict.fromkeys(range(n), room) | {"cpu": 0}, placement)), None)


def _gpus(budget: Memory, placement: PlacementSettings | None = None) -> dict[int | str, int]:
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


def _largest_block(model: PreTrainedModel) -> int:
    indivisible, sizes = _indivisible(model), compute_module_sizes(model)

    def is_block(module: nn.Module) -> bool:
        return type(module).__name__ in indivisible or next(module.children(), None) is None

    return max(int(sizes.get(name, 0)) for name, module in model.named_modules() if is_block(module))


def _parse_device(device: object) -> int | str:
    """`0`, `"0"` and `"cuda:0"` as 0; anything else as it is written."""
    text = str(device).removeprefix("cuda:")
    return int(text) if text.isdigit() else text


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB"
