"""Which of several ways to draft differ from the best, all compared at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from harness.report.pairs import MeasuredPair
from harness.report.regression import ms_per_token
from harness.results.statistics.interval import FEWEST_FOR_INTERVAL
from harness.results.statistics.multiplicity import Ranked, ranking

_NUM_RESAMPLES = 4000


def rivals_lines(pairs: Sequence[MeasuredPair]) -> list[str]:
    """Say which pairs cannot be told apart from the fastest, and which are slower.

    Args:
        pairs: of one target under one set of conditions.

    Returns:
        [] where a pair's prompts are not known, or prompts do not suffice.
    """
    times = [_times(pair) for pair in pairs]
    units = sorted(set.intersection(*(set(of_pair) for of_pair in times)))
    digests = {pair.row.prompts_digest for pair in pairs}
    if len(pairs) < 2 or len(units) < FEWEST_FOR_INTERVAL or len(digests) > 1:
        return []
    regular = np.array([[of_pair[unit][0] for unit in units] for of_pair in times])
    speculative = np.array([[of_pair[unit][1] for unit in units] for of_pair in times])
    best, *others = ranking(regular, speculative, _NUM_RESAMPLES, seed=0)
    name = _name(pairs[best.index])
    alike = [_in_words(pairs, one) for one in others if not one.worse]
    slower = [_in_words(pairs, one) for one in others if one.worse]
    lines = []
    if alike:
        lines.append(f"Cannot be told apart from {name}, the fastest: {', '.join(alike)}.")
    if slower:
        lines.append(f"Significantly slower than {name}: {', '.join(slower)}.")
    covers = best.of_best.covers
    return [*lines, f"Shares of its speed-up, with simultaneous 95 % intervals over {covers}."]


def _times(pair: MeasuredPair) -> dict[tuple[int, ...], tuple[float, float]]:
    """Milliseconds per token of both arms, by the prompts of a unit."""
    regular = ms_per_token(pair.run.prompts, "regular")
    speculative = ms_per_token(pair.run.prompts, "speculative")
    return {unit: (regular[unit], ms) for unit, ms in speculative.items() if unit in regular}


def _name(pair: MeasuredPair) -> str:
    return " · ".join([str(pair.row.draft), *pair.name.details])


def _in_words(pairs: Sequence[MeasuredPair], one: Ranked) -> str:
    share = one.of_best
    bounds = f"{share.low:.2f} to {share.high:.2f}"
    return f"{_name(pairs[one.index])} ({share.estimate:.2f}; {bounds})"
