"""What to say of models that do not fit: what would fit instead, and where they would go if they must."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from harness.config.amounts import amount
from harness.config.errors import RunError, SettingError
from harness.config.settings import Quantization
from harness.models.fit import Case, Memory, Misfit, Placement, fit
from harness.models.sketch import Sketch

# The published runs had 8 GPUs; beyond this many the answer is another model.
_MOST_GPUS = 64


def fit_or_explain(case: Case, *, force: bool = False) -> list[Placement]:
    """See `fit`; with `force` see `fit_regardless`.

    Raises RunError if a model does not fit: what it needs, what is free and what would fit.
    """
    try:
        return fit(case)
    except Misfit as misfit:
        if force:
            return fit_regardless(case)
        instead = remedies(case)
        second = f"what would fit: {', '.join(instead)}" if instead else "a smaller model is needed"
        raise RunError(f"{misfit}\n{second} (force=true tries anyway)") from None


def fit_regardless(case: Case) -> list[Placement]:
    """Where the models would be if every device had that many times more memory, but no more than it takes."""
    case = replace(case, placement=replace(case.placement, reserve_gb=0.0))
    # A machine without any free memory has to begin somewhere.
    free = {device: max(n, 10**8) for device, n in case.free.items()}
    larger = (
        replace(case, free={device: int(n * 1.05**step) for device, n in free.items()})
        for step in range(1000)
    )
    return fit(next(filter(_fits, larger)))


def remedies(case: Case) -> list[str]:
    """Changes of settings, and of the machine, each of which makes the models fit; with the bytes they then take."""
    target, *drafts = case.models
    found: list[str] = []

    def helps(said: str, *models: Sketch, **changes: Any) -> bool:
        """Add a change to those found if the models then fit."""
        fits = _fits(replace(case, models=models or case.models, **changes))
        found.extend([said] if fits else [])
        return fits

    one = replace(case.demand, batch_size=1)
    if rows := _most(
        case.demand.batch_size, lambda n: _fits(replace(case, demand=replace(one, batch_size=n)))
    ):
        found.append(f"batch_size={rows}")
    elif tokens := _most(
        case.demand.new_tokens, lambda n: _fits(replace(case, demand=replace(one, new_tokens=n)))
    ):
        found.append(f"batch_size=1 decoding.max_new_tokens={tokens}")
    if case.placement.strategy == "tensor_parallel" and drafts:
        settings = replace(drafts[0].settings, placement="tensor_parallel")
        helps("draft.placement=tensor_parallel", target, replace(drafts[0], settings=settings))
    if not case.pool(target) and target.dtype == torch.float32:
        half = [replace(sketch, dtype=torch.bfloat16) for sketch in case.models]
        helps(f"dtype=bfloat16 ({amount(sum(sketch.weight_bytes for sketch in half))})", *half)
    smaller = [_smaller(sketch) for sketch in case.models]
    for index, ways in enumerate(smaller):
        for said, other in ways:
            helps(said, *case.models[:index], other, *case.models[index + 1 :])
    if not found and drafts:
        for (first, model), (second, draft) in itertools.product(*smaller):
            if helps(f"{first} with {second}", model, draft):
                break
    if gpus := case.pool(target):
        spread = replace(case.placement, strategy="balanced", gpus=None, device_map=None)
        unlimited = [
            replace(sketch, settings=replace(sketch.settings, gpus=None)) for sketch in case.models
        ]
        all_gpus = "spread over all GPUs (placement.strategy=balanced, no limit on gpus)"
        if not helps(all_gpus, *unlimited, placement=spread):
            room = max(case.free[gpu] for gpu in gpus)
            for count in range(len(case.gpus) + 1, _MOST_GPUS + 1):
                free: Memory = {**dict.fromkeys(range(count), room), "cpu": 0}
                if helps(
                    f"{count} GPUs with as much free", *unlimited, placement=spread, free=free
                ):
                    break
        if case.placement.offload == "none":
            helps("placement.offload=cpu (slow)", placement=replace(case.placement, offload="cpu"))
    return found


def advice_on_8bit(models: Iterable[Sketch], placements: Iterable[Placement]) -> str | None:
    """What is faster than LLM.int8() on a GPU, which reads each layer's outliers on the host; None without.

    The author of bitsandbytes says so of inference (its issue 490).
    """
    slow = [
        sketch.role
        for sketch, placed in zip(models, placements, strict=False)
        if sketch.quantization == "8bit" and placed.devices[0].type == "cuda"
    ]
    advice = "8-bit layers wait for the host in every pass; quantization=4bit is usually faster"
    return f"{' and '.join(slow)}: {advice}" if slow else None


def _fits(case: Case) -> bool:
    try:
        return bool(fit(case))
    except (Misfit, SettingError):  # what is split over ranks cannot be quantized, for one
        return False


def _most(limit: int, fits: Callable[[int], bool]) -> int:
    """The largest number below `limit` that fits; 0 for none."""
    return bisect.bisect_left(range(1, limit), True, key=lambda n: not fits(n))


def _smaller(sketch: Sketch) -> list[tuple[str, Sketch]]:
    """The same model held in fewer bytes: the settings that say so, and the sketch."""
    # A sketch knows of no such matrices without bitsandbytes, nor where its weights have a format already.
    if not any(tensor.outputs for tensor in sketch.tensors):
        return []
    found = []
    ways: tuple[Quantization, ...] = ("none", "8bit", "4bit")
    for way in ways[ways.index(sketch.quantization) + 1 :]:
        other = replace(
            sketch, settings=replace(sketch.settings, quantization=way), quantization=way
        )
        found.append((f"{sketch.role}.quantization={way} ({amount(other.weight_bytes)})", other))
    return found
