"""Joules per token of both arms, and in how many units GPUs were throttled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.engines.timing import Generation
from harness.results.statistics.ratios import ratio_of_totals, totals_by_unit


def energy_columns(generations: Sequence[Generation], units: Sequence[int]) -> dict[str, Any]:
    """The columns of one arm; none where no GPU tells."""
    used = [(generation, generation.gpu) for generation in generations]
    if not used or any(gpu is None for _, gpu in used):
        return {}
    throttled = {unit for unit, (_, gpu) in zip(units, used, strict=False) if gpu and gpu.throttled}
    columns: dict[str, Any] = {
        "num_units": len(set(units[: len(used)])),
        "num_throttled_units": len(throttled),
    }
    joules = [gpu.joules for _, gpu in used if gpu is not None and gpu.joules is not None]
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
    """The columns of both arms' ratio, with a paired interval over units; none where one is not known."""
    pairs = list(zip(regular, speculative, strict=False))
    known = [
        (unit, *energies)
        for unit, pair in zip(units, pairs, strict=False)
        if (energies := _per_token(pair)) is not None
    ]
    if not pairs or len(known) < len(pairs):
        return {}
    of_pairs = [unit for unit, _, _ in known]
    found = ratio_of_totals(
        totals_by_unit([first for _, first, _ in known], of_pairs),
        totals_by_unit([second for _, _, second in known], of_pairs),
        num_resamples,
        seed,
    )
    return found.columns("energy_ratio", "energy_ratio_low", "energy_ratio_high")


def _per_token(pair: tuple[Generation, Generation]) -> tuple[float, float] | None:
    """Joules per token of both arms; None where one is not known."""
    found = []
    for generation in pair:
        joules = generation.gpu.joules if generation.gpu is not None else None
        tokens = _num_tokens(generation)
        if joules is None or not tokens:
            return None
        found.append(joules / tokens)
    return found[0], found[1]


def _num_tokens(generation: Generation) -> int:
    return sum(request.num_tokens for request in generation.requests if request.answered)
