"""Joules per token of both arms, and in how many units GPUs were throttled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.engines.timing import Generation
from harness.results.statistics.ratios import ratio_of_totals, totals_by_unit


def energy_columns(generations: Sequence[Generation], units: Sequence[int]) -> dict[str, Any]:
    """The columns of one arm; none without GPUs that report their energy.

    Args:
        units: of each generation, the prompt, batch or lap that it measured.
    """
    used = [generation.gpu for generation in generations if generation.gpu is not None]
    if not used or len(used) < len(generations):
        return {}
    throttled = {unit for unit, gpu in zip(units, used, strict=False) if gpu.throttled}
    columns: dict[str, Any] = {
        "num_units": len(set(units[: len(used)])),
        "num_throttled_units": len(throttled),
    }
    joules = [gpu.joules for gpu in used if gpu.joules is not None]
    tokens = sum(_num_tokens(generation) for generation in generations)
    if len(joules) == len(used) and tokens:
        columns["joules_per_token"] = sum(joules) / tokens
    return columns


def energy_ratio_columns(
    regular: Sequence[Generation],
    speculative: Sequence[Generation],
    units: Sequence[int],
    num_resamples: int,
    seed: int,
) -> dict[str, Any]:
    """The columns of both arms' ratio, with a paired interval over units; none where the joules of
    any generation are unknown.
    """
    regular_joules: list[float] = []
    speculative_joules: list[float] = []
    for pair in zip(regular, speculative, strict=False):
        first, second = map(_joules_per_token, pair)
        if first is None or second is None:
            return {}
        regular_joules.append(first)
        speculative_joules.append(second)
    if not regular_joules:
        return {}
    units_of_pairs = units[: len(regular_joules)]
    ratio = ratio_of_totals(
        totals_by_unit(regular_joules, units_of_pairs),
        totals_by_unit(speculative_joules, units_of_pairs),
        num_resamples,
        seed,
    )
    return ratio.columns("energy_ratio")


def _joules_per_token(generation: Generation) -> float | None:
    joules = None if generation.gpu is None else generation.gpu.joules
    num_tokens = _num_tokens(generation)
    if joules is None or num_tokens == 0:
        return None
    return joules / num_tokens


def _num_tokens(generation: Generation) -> int:
    return sum(request.num_tokens for request in generation.requests if request.answered)
