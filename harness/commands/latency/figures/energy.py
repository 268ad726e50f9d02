"""Joules per token of both arms, and in how many units GPUs were throttled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from harness.engines.timing import Generation
from harness.results.statistics.ratios import ratio_of_totals, totals_by_unit

# At most this share of an arm's answers may be shorter than the period in which a GPU counts its
# energy. Each of them is charged to whatever the GPU does when the period ends.
_MOST_TOO_SHORT = 0.1


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
    joules = _joules(generations)
    tokens = sum(map(_num_tokens, generations))
    if joules and tokens:
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
    an arm are unknown.

    A unit in which an arm was too fast for the counter is left out.
    """
    totals = []
    size = min(len(regular), len(speculative))
    for generations in (regular[:size], speculative[:size]):
        joules = _joules(generations)
        tokens = list(map(_num_tokens, generations))
        if not joules or 0 in tokens:
            return {}
        per_token = np.divide(joules, tokens)
        totals.append(totals_by_unit(per_token, units[:size]))
    of_regular, of_speculative = totals
    counted = (of_regular > 0) & (of_speculative > 0)
    ratio = ratio_of_totals(of_regular[counted], of_speculative[counted], num_resamples, seed)
    return {"energy_ratio": ratio}


def _joules(generations: Sequence[Generation]) -> list[float]:
    """The energy of each; [] where one is unknown, or many were too short to be counted."""
    known = [generation.gpu.joules for generation in generations if generation.gpu is not None]
    joules = [each for each in known if each is not None]
    if len(joules) < len(generations) or joules.count(0) > _MOST_TOO_SHORT * len(joules):
        return []
    return joules


def _num_tokens(generation: Generation) -> int:
    return sum(request.num_tokens for request in generation.requests if request.answered)
