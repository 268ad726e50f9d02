"""Advice on models that do not fit: settings and machines with which they would."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

from harness.config.amounts import amount
from harness.config.errors import RunError, SettingError
from harness.config.settings import Quantization
from harness.models.case import Case, Memory, Misfit, Placement
from harness.models.fit import fit
from harness.models.sketch import Sketch

# The published runs had 8 GPUs; beyond this many the answer is another model.
_MOST_GPUS = 64

# From the mildest to the strongest.
_QUANTIZATIONS: tuple[Quantization, ...] = ("none", "8bit", "4bit")

# A change in words, and the case with this change.
_Change = tuple[str, Case]


def fit_or_explain(case: Case, *, force: bool = False) -> list[Placement]:
    """Place the models as `fit` does, or with `force` as `fit_regardless` does.

    Raises:
        RunError: a model does not fit; with what it needs, what is free and what would fit.
    """
    try:
        return fit(case)
    except Misfit as misfit:
        if force:
            return fit_regardless(case)
        texts = remedies(case)
        advice = f"what would fit: {', '.join(texts)}" if texts else "a smaller model is needed"
        raise RunError(f"{misfit}\n{advice} (force=true tries anyway)") from None


def fit_regardless(case: Case) -> list[Placement]:
    """Place the models as if every device had more memory, by the smallest factor that suffices."""
    placement = replace(case.placement, reserve_gb=0.0)
    # A machine without any free memory has to begin somewhere.
    free = {device: max(size, 10**8) for device, size in case.free.items()}
    for step in range(1000):
        larger = {device: int(size * 1.05**step) for device, size in free.items()}
        enlarged = replace(case, placement=placement, free=larger)
        if _fits(enlarged):
            return fit(enlarged)
    raise RunError("the models fit on no machine, however large")


def remedies(case: Case) -> list[str]:
    """Changes of settings or of the machine, each of which makes the models fit."""
    texts = _less_text(case)
    texts += _helpful(_changed_models(case))
    if not texts:
        texts += itertools.islice(_helpful(_quantized_models(case, 2)), 1)
    if case.gpus_for(case.models[0]):
        texts += _more_gpus(case)
        if case.placement.offload == "none":
            offload = replace(case.placement, offload="cpu")
            texts += _helpful([("placement.offload=cpu (slow)", replace(case, placement=offload))])
    return texts


def advice_on_8bit(models: Iterable[Sketch], placements: Iterable[Placement]) -> str | None:
    """Advise against LLM.int8() on a GPU, where it reads each layer's outliers on the host.

    The author of bitsandbytes says so of inference (its issue 490). None without such a model.
    """
    slow = []
    for sketch, placement in zip(models, placements, strict=False):
        if sketch.quantization == "8bit" and placement.devices[0].type == "cuda":
            slow.append(sketch.role)
    if not slow:
        return None
    advice = "8-bit layers wait for the host in every pass; quantization=4bit is usually faster"
    return f"{' and '.join(slow)}: {advice}"


def _fits(case: Case) -> bool:
    try:
        return bool(fit(case))
    except (Misfit, SettingError):  # for example, quantized weights cannot be split over ranks
        return False


def _helpful(changes: Iterable[_Change]) -> Iterator[str]:
    return (text for text, case in changes if _fits(case))


def _less_text(case: Case) -> list[str]:
    """The largest smaller batch that fits; or else the most new tokens of a single row."""

    def fits(**changes: Any) -> bool:
        return _fits(replace(case, demand=replace(case.demand, **changes)))

    demand = case.demand
    rows = _most(demand.batch_size, lambda number: fits(batch_size=number))
    if rows:
        return [f"{demand.rows_setting}={rows}"]
    tokens = _most(demand.new_tokens, lambda number: fits(batch_size=1, new_tokens=number))
    return [f"{demand.rows_setting}=1 {demand.tokens_setting}={tokens}"] if tokens else []


def _most(limit: int, fits: Callable[[int], bool]) -> int:
    """The largest number below `limit` that fits; 0 for none."""
    return bisect.bisect_left(range(1, limit), True, key=lambda number: not fits(number))


def _changed_models(case: Case) -> Iterator[_Change]:
    """A split draft, half precision on the CPU, and either model in fewer bits."""
    target, *drafts = case.models
    if case.placement.strategy == "tensor_parallel" and drafts:
        settings = replace(drafts[0].settings, placement="tensor_parallel")
        split_draft = replace(drafts[0], settings=settings)
        yield "draft.placement=tensor_parallel", replace(case, models=(target, split_draft))
    if not case.gpus_for(target) and target.dtype == torch.float32:
        halves = tuple(replace(sketch, dtype=torch.bfloat16) for sketch in case.models)
        size = amount(sum(sketch.weight_bytes for sketch in halves))
        yield f"dtype=bfloat16 ({size})", replace(case, models=halves)
    yield from _quantized_models(case, 1)


def _quantized_models(case: Case, number: int) -> Iterator[_Change]:
    """So many of the models in fewer bits."""
    for chosen in itertools.combinations(case.models, number):
        for choice in itertools.product(*map(_quantized, chosen)):
            texts = [text for text, _ in choice]
            smaller = {sketch.role: sketch for _, sketch in choice}
            models = tuple(smaller.get(sketch.role, sketch) for sketch in case.models)
            yield " with ".join(texts), replace(case, models=models)


def _quantized(sketch: Sketch) -> Iterator[tuple[str, Sketch]]:
    """The same model in fewer bits: the setting, and the sketch."""
    # A sketch has no such matrices without bitsandbytes, nor if its weights have a format already.
    if not any(tensor.outputs for tensor in sketch.tensors):
        return
    first = _QUANTIZATIONS.index(sketch.quantization) + 1
    for quantization in _QUANTIZATIONS[first:]:
        settings = replace(sketch.settings, quantization=quantization)
        smaller = replace(sketch, settings=settings, quantization=quantization)
        size = amount(smaller.weight_bytes)
        yield f"{sketch.role}.quantization={quantization} ({size})", smaller


def _more_gpus(case: Case) -> list[str]:
    """All GPUs of this machine, or the fewest that are enough, each with as much free memory."""
    placement = replace(case.placement, strategy="balanced", gpus=None, device_map=None)
    models = tuple(
        replace(sketch, settings=replace(sketch.settings, gpus=None)) for sketch in case.models
    )
    spread = replace(case, models=models, placement=placement)
    if _fits(spread):
        return ["spread over all GPUs (placement.strategy=balanced, no limit on gpus)"]
    room = max(case.free[gpu] for gpu in case.gpus_for(case.models[0]))
    for count in range(len(case.gpus) + 1, _MOST_GPUS + 1):
        free: Memory = {**dict.fromkeys(range(count), room), "cpu": 0}
        if _fits(replace(spread, free=free)):
            return [f"{count} GPUs with as much free"]
    return []
