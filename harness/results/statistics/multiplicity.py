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

from harness.results.statistics import Floats
from harness.results.statistics.interval import CONFIDENCE, Interval, t_quantile
from harness.results.statistics.runs import product_ratio_over_runs


def relative_speedup(
    alternative: tuple[Floats, Floats],
    reference: tuple[Floats, Floats],
    family: int,
    unseen: tuple[float, float] = (0.0, 0.0),
    unit: str = "prompt",
) -> Interval:
    """The speed-up of an alternative divided by that of the reference, with an interval over units and runs.

    The interval has Šidák's level (1967) for all pairs of `family` alternatives. Because the intervals of all pairs
    hold simultaneously, those of pairs with the reference do so even if the reference was chosen by the same data.

    In simulations of six and of ten equal alternatives on 9 to 30 prompts, 1.3 to 4.5 % of the tables showed a
    difference by chance. In some of these simulations the lengths of answers varied by a factor of 1.6, in others by
    2.2.

    Args:
        alternative, reference: the ms of the regular and of the speculative arm, [num_runs, num_units], positive. All
            four arrays have the same units.
        family: number of alternatives that a reader sees together.
        unseen: `Coverage.unseen` of the alternative's speed-up and of the reference's: for each, the logarithm of the
            factor by which rejections that the prompts did not show may lower that speed-up.
        unit: as in `ratio_over_runs`.

    Returns:
        The bounds are nan if there are too few units.
    """
    regular, speculative = alternative
    others_regular, others_speculative = reference
    # (regular / speculative) / (others_regular / others_speculative)
    share = product_ratio_over_runs(
        [regular, others_speculative], [speculative, others_regular], unit
    )
    num_pairs = max(1, family * (family - 1) // 2)
    interval = share.interval(CONFIDENCE ** (1 / num_pairs))
    # Rejections that no prompt showed could lower the alternative's speed-up, which lowers the ratio; or they could
    # lower the reference's speed-up, which raises the ratio.
    its_unseen, others_unseen = unseen
    low = interval.low * math.exp(-its_unseen)
    return replace(interval, low=low, high=interval.high * math.exp(others_unseen))


def widened(interval: Interval, num_intervals: int, confidence: float = CONFIDENCE) -> Interval:
    """Widen the interval of a ratio, so that it holds simultaneously with the other intervals of a table.

    All intervals then hold in 95 % of the cases (Šidák's inequality, for jointly normal logarithms). For alternatives
    on the same prompts, `relative_speedup` is better: it compares prompt by prompt, and so finds smaller differences.

    Args:
        interval: a Student's t interval of the log ratio; a normal interval if `covers` is None. Without
            `Coverage.degrees_of_freedom`, they are taken to be one less than the number of units. Answers of different
            lengths may have fewer, unless `Coverage.num_effective` counts them; the interval is then widened too
            little. Returned unchanged if it has no bounds.
        num_intervals: number of intervals in the table; with 1, the interval is returned unchanged.
        confidence: level of the interval. A level above 95 % means that the interval was already widened for repeated
            looks (`stopping.CONFIDENCE_OF_LOOKS`), and misses about as often as a 95 % interval without looks. For
            example, at 97 % it misses in 3 % of the cases without looks, not in 5 %, so the probability of missing for
            which the interval is widened is multiplied by 3/5, too.
    """
    if num_intervals == 1 or not interval.has_bounds:
        return interval
    covers = interval.covers
    # Those of a normal interval.
    degrees_of_freedom = math.inf
    if covers is not None:
        degrees_of_freedom = covers.degrees_of_freedom or covers.fewest - 1
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
