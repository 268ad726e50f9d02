"""Simultaneous intervals for several alternatives: all of them hold in 95 % of the cases. Of thirty ordinary 95 %
intervals, one or two miss on average.

A series of runs is ranked with these functions: the alternatives are ways to draft, the units are prompts, and the
ratios of totals are speed-ups.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike

from harness.results.statistics.interval import CONFIDENCE, Interval, t_quantile
from harness.results.statistics.runs import product_ratio_over_runs


def relative_to(
    reference: int,
    numerators: ArrayLike,
    denominators: ArrayLike,
    family: int,
    unseen: Sequence[float],
    unit: str = "prompt",
) -> list[Interval]:
    """The ratio of totals of each alternative, divided by that of the reference, with simultaneous intervals.

    Each interval is over units and runs, and has Šidák's level (1967) for all pairs of alternatives. Because the
    intervals of all pairs hold simultaneously, the intervals of pairs with the reference do so even if the reference
    was chosen by the same data.

    In simulations of six and of ten equal alternatives on 9 to 30 prompts, 1.3 to 4.5 % of the tables showed a
    difference by chance. The lengths of answers varied by factors of 1.6 and 2.2.

    Args:
        reference: index of the alternative that the others are compared with.
        numerators: [num_alternatives, num_runs, num_units], positive: for speed-ups the ms of each regular arm on the
            same prompts.
        denominators: the same shape: the ms of each speculative arm.
        family: number of alternatives that a reader sees together.
        unseen: [num_alternatives], `Coverage.unseen` of each alternative's speed-up.
        unit: as in `ratio_over_runs`.

    Returns:
        [num_alternatives], in the order of the alternatives. The reference's own ratio is 1, and its bounds have no
            meaning. The bounds are nan if there are too few units.
    """
    tops, bottoms = np.array([numerators, denominators], dtype=np.float64)
    num_pairs = max(1, family * (family - 1) // 2)
    confidence = CONFIDENCE ** (1 / num_pairs)
    intervals = []
    for top, bottom, its_unseen in zip(tops, bottoms, unseen, strict=True):
        # (top / bottom) / (tops[reference] / bottoms[reference])
        share = product_ratio_over_runs([top, bottoms[reference]], [bottom, tops[reference]], unit)
        interval = share.interval(confidence)
        # Rejections that no prompt showed could lower the alternative's speed-up, which lowers the ratio; or they could
        # lower the reference's speed-up, which raises the ratio.
        low = interval.low * math.exp(-its_unseen)
        high = interval.high * math.exp(unseen[reference])
        intervals.append(replace(interval, low=low, high=high))
    return intervals


def widened(interval: Interval, num_intervals: int, confidence: float = CONFIDENCE) -> Interval:
    """Widen the interval of a ratio, so that it holds simultaneously with the other intervals of a table.

    All intervals then hold in 95 % of the cases (Šidák's inequality, for jointly normal logarithms). For alternatives
    on the same prompts, `relative_to` is better: it compares them prompt by prompt, and so finds smaller differences.

    Args:
        interval: a Student's t interval of the log ratio; a normal interval if `covers` is None. Its degrees of freedom
            are taken to be one less than the smallest number of things that it covers: 4 for `15 prompts and 5 runs`.
            An interval over runs may have more (14 there); it is then widened by more than necessary. Returned
            unchanged if it has no bounds.
        num_intervals: number of intervals in the table; with 1, the interval is returned unchanged.
        confidence: level of the interval. A level above 95 % means that the interval was already widened for repeated
            looks (`stopping.CONFIDENCE_OF_LOOKS`), and misses about as often as a 95 % interval without looks. The
            nominal probability of missing, 1 - `confidence`, is then 3 % instead of 5 %, and that of the widened
            interval is multiplied by the same factor, 3/5.
    """
    if num_intervals == 1 or not interval.has_bounds:
        return interval
    covers = interval.covers
    degrees_of_freedom = math.inf if covers is None else covers.fewest - 1
    alpha = 1 - confidence
    alpha_of_each = (1 - CONFIDENCE ** (1 / num_intervals)) * alpha / (1 - CONFIDENCE)
    wider = t_quantile(alpha_of_each / 2, degrees_of_freedom)
    factor = wider / t_quantile(alpha / 2, degrees_of_freedom)
    low = interval.estimate * (interval.low / interval.estimate) ** factor
    high = interval.estimate * (interval.high / interval.estimate) ** factor
    return Interval(interval.estimate, low, high, covers)


def adjusted_p_values(p_values: Sequence[float]) -> list[float]:
    """Adjust p-values for their number (Benjamini and Hochberg 1995); nan stays nan: [0.01, 0.04, nan] becomes
    [0.02, 0.04, nan].

    Among the results with an adjusted value below 0.05, at most 5 % are false on average.
    """
    values = np.array(p_values, dtype=np.float64)
    is_known = ~np.isnan(values)
    if is_known.any():
        from scipy import stats

        values[is_known] = stats.false_discovery_control(values[is_known], method="bh")
    return [float(value) for value in values]
