"""Advice on models that do not fit: settings with which they would, as they are typed."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal

from harness.config.amounts import amount
from harness.config.demand import Remedy
from harness.config.errors import RunError, SettingError
from harness.config.model_names import canonical_name
from harness.config.settings import Quantization
from harness.local.models.fit import Case, Misfit, Placement, fit
from harness.local.models.sketch import Sketch

# The published runs had 8 GPUs; beyond this many the answer is another model.
_MOST_GPUS = 64

# From the mildest to the strongest.
_QUANTIZATIONS: tuple[Quantization, ...] = ("none", "8bit", "4bit")


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
        texts = ", ".join(map(str, remedies(case)))
        advice = f"what would fit: {texts}" if texts else "a smaller model is needed"
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


def remedies(case: Case) -> list[Remedy]:
    """Changes of settings or of the machine, each of which makes the models fit."""
    return [*_less_text(case), *_fewer_bits(case), *_more_gpus(case)]


def _fits(case: Case) -> bool:
    try:
        return bool(fit(case))
    except (Misfit, SettingError):
        return False


def _typed(sketch: Sketch, setting: Literal["quantization", "gpus"], value: object) -> str:
    """A model with another setting, as it is typed: `model=65B_4bit`, `model=65B_4GPUs`, or
    `model.quantization=4bit` where the name takes no suffix.
    """
    name = sketch.settings.name
    if "/" in name or name.endswith("_tree"):
        return f"{sketch.role}.{setting}={value}"
    suffix = f"{value}GPUs" if setting == "gpus" else value
    return f"{sketch.role}={canonical_name(f'{name}_{suffix}')}"


def _less_text(case: Case) -> list[Remedy]:
    """The largest smaller batch that fits; or else the most new tokens of a single row."""

    def fits(**changes: Any) -> bool:
        return _fits(replace(case, demand=replace(case.demand, **changes)))

    demand = case.demand
    rows = _most(demand.batch_size, lambda number: fits(batch_size=number))
    if rows:
        return [Remedy(f"batch_size={rows}")]
    tokens = _most(demand.new_tokens, lambda number: fits(batch_size=1, new_tokens=number))
    one_row = f"batch_size=1 decoding.max_new_tokens={tokens}"
    return [Remedy(one_row)] if tokens else []


def _most(limit: int, fits: Callable[[int], bool]) -> int:
    """The largest number below `limit` that fits; 0 for none."""
    return bisect.bisect_left(range(1, limit), True, key=lambda number: not fits(number))


def _fewer_bits(case: Case) -> list[Remedy]:
    """Each model in fewer bits; where that is never enough, the mildest change of both."""
    smaller = [_quantized(sketch) for sketch in case.models]
    alone = [[sketch] for sketches in smaller for sketch in sketches]
    fitting = [_in_fewer_bits(sketches) for sketches in alone if _fits(_changed(case, sketches))]
    if fitting or len(smaller) == 1:
        return fitting
    for pair in itertools.product(*smaller):
        if _fits(_changed(case, pair)):
            return [_in_fewer_bits(pair)]
    return []


def _quantized(sketch: Sketch) -> list[Sketch]:
    """The same model in fewer bits."""
    # A sketch has no such matrices without bitsandbytes, nor if its weights have a format already.
    if not any(tensor.outputs for tensor in sketch.tensors):
        return []
    smaller = []
    for quantization in _QUANTIZATIONS[_QUANTIZATIONS.index(sketch.quantization) + 1 :]:
        settings = replace(sketch.settings, quantization=quantization)
        smaller.append(replace(sketch, settings=settings, quantization=quantization))
    return smaller


def _in_fewer_bits(sketches: Sequence[Sketch]) -> Remedy:
    typed = [_typed(sketch, "quantization", sketch.quantization) for sketch in sketches]
    return Remedy(" ".join(typed), amount(sum(sketch.weight_bytes for sketch in sketches)))


def _more_gpus(case: Case) -> list[Remedy]:
    """The fewest GPUs for the target that are enough: of this machine, or with more of them, each
    with as much free memory.
    """
    target = case.models[0]
    if not case.gpus_for(target):
        return []
    room = max(case.free[gpu] for gpu in case.gpus)
    for count in range(2, _MOST_GPUS + 1):
        spread = replace(target, settings=replace(target.settings, gpus=count))
        enough = replace(case, free={**dict.fromkeys(range(count), room), **case.free})
        if _fits(_changed(enough, [spread])):
            missing = count if count > len(case.gpus) else None
            return [Remedy(_typed(target, "gpus", count), num_gpus=missing)]
    return []


def _changed(case: Case, sketches: Iterable[Sketch]) -> Case:
    """The case with these in place of the models with the same roles."""
    by_role = {sketch.role: sketch for sketch in sketches}
    return replace(case, models=tuple(by_role.get(sketch.role, sketch) for sketch in case.models))
