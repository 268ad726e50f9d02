"""Several alternatives at once: intervals that all hold, because thirty of 95 % are expected to miss once or twice.

A series of runs is ranked with this: its alternatives are ways to draft, its units prompts, and the ratios of totals
are speed-ups.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from harness.results.statistics.arrays import Floats
from harness.results.statistics.distributions import t_quantile
from harness.results.statistics.interval import (
    CONFIDENCE,
    FEWEST_FOR_INTERVAL,
    NAN,
    Coverage,
    Interval,
)


def relative_to(reference: int, numerators: ArrayLike, denominators: ArrayLike) -> list[Interval]:
    """The ratio of totals of each alternative over that of one of them, with simultaneous intervals.

    Each interval is Student's t on the logarithm of two alternatives' ratios, with jackknife
    errors, at Šidák's level for all pairs of alternatives. Because every pair is covered, the pairs
    with the reference are, even if the data chose it. The intervals cover the choice of units,
    not runs.

    Args:
        reference: the index of the alternative that the others are compared with.
        numerators: [num_alternatives, num_units], positive: for speed-ups the ms of each regular
            arm on the same prompts.
        denominators: the same shape: the ms of each speculative arm.

    Returns:
        [num_alternatives]; bounds are nan for the reference itself, for an alternative that equals it on every unit,
        and if there are too few units.
    """
    # In simulations of six to ten equal alternatives on 9 to 30 prompts of unlike lengths, 4.4 to
    # 5.2 % of the tables had a difference by chance. A studentised bootstrap (max-t) has fewer than
    # its nominal 5 % there, with intervals up to twice as wide: a resample of nine units may hold
    # only two different ones.
    tops, bottoms = np.array([numerators, denominators], dtype=np.float64)
    num_alternatives, num_units = tops.shape
    log_ratios = _log_ratios(tops, bottoms)
    influences = _influences(tops, bottoms)
    num_pairs = num_alternatives * (num_alternatives - 1) // 2
    covers = Coverage(num_units, "prompt")
    intervals = []
    for log_ratio, influence in zip(log_ratios, influences, strict=True):
        change = float(log_ratio - log_ratios[reference])
        error = _standard_error(influence - influences[reference])
        low = high = NAN
        if error > 0:  # neither zero, as for the best itself, nor nan
            half_width = _critical_t(num_pairs, num_units - 1) * error
            low = math.exp(change - half_width)
            high = math.exp(change + half_width)
        intervals.append(Interval(math.exp(change), low, high, covers))
    return intervals


def widened(
    interval: Interval,
    num_intervals: int,
    degrees_of_freedom: float,
    confidence: float,
) -> Interval:
    """Widen the interval of a ratio, so that it holds jointly with the others of a table.

    All of them hold in 95 % of the cases, however they depend on each other. For pairs on the same
    prompts use `relative_to`: it compares them prompt by prompt, and finds smaller differences.

    Args:
        interval: by Student's t on the log ratio.
        num_intervals: number of intervals in the table.
        degrees_of_freedom: those of that t; a smaller number makes the interval wider than needed.
        confidence: level of the interval. Above 95 % it misses as often as one of 95 % should, because it was looked at
            (`stopping.CONFIDENCE_OF_LOOKS`); what the wider one may miss is smaller by the same factor.
    """
    degrees_of_freedom = max(degrees_of_freedom, 1)
    alpha = 1 - confidence
    alpha_of_each = (1 - CONFIDENCE ** (1 / num_intervals)) * alpha / (1 - CONFIDENCE)
    wider = t_quantile(alpha_of_each / 2, degrees_of_freedom)
    factor = wider / t_quantile(alpha / 2, degrees_of_freedom)
    low = interval.estimate * (interval.low / interval.estimate) ** factor
    high = interval.estimate * (interval.high / interval.estimate) ** factor
    return Interval(interval.estimate, low, high, interval.covers)


def adjusted_p_values(p_values: Sequence[float]) -> list[float]:
    """Adjust p-values for their number (Benjamini and Hochberg 1995); nan stays nan.

    Of the results with an adjusted value below 0.05, at most 5 % are false on average.
    """
    values = np.asarray(p_values, dtype=np.float64)
    is_known = ~np.isnan(values)
    if is_known.any():
        from scipy import stats

        values[is_known] = stats.false_discovery_control(values[is_known], method="bh")
    return [float(value) for value in values]


def _log_ratios(numerators: Floats, denominators: Floats) -> Floats:
    return np.asarray(np.log(numerators.sum(axis=1) / denominators.sum(axis=1)))


def _influences(numerators: Floats, denominators: Floats) -> Floats:
    """Return each unit's influence on the log of each alternative's ratio; the mean is 0.

    By the jackknife: the change when the unit is left out. The first-order influence would be too
    small where some units are much longer than others: a long unit pulls the total towards itself.
    """
    num_units = numerators.shape[1]
    if num_units == 1:
        return np.zeros(numerators.shape)
    without = np.log(numerators.sum(axis=1, keepdims=True) - numerators)
    without -= np.log(denominators.sum(axis=1, keepdims=True) - denominators)
    return np.asarray((num_units - 1) * (without.mean(axis=1, keepdims=True) - without))


def _standard_error(influences: Floats) -> float:
    """Return the standard error of a log ratio; nan if there are too few units for an interval."""
    if len(influences) < FEWEST_FOR_INTERVAL:
        return NAN
    return float(influences.std(ddof=1)) / math.sqrt(len(influences))


def _critical_t(num_intervals: int, degrees_of_freedom: float) -> float:
    """Return the critical value of Student's t for simultaneous intervals (Šidák 1967).

    `num_intervals` is at least 1: a table of one alternative has no pair, and no call.
    """
    level = CONFIDENCE ** (1 / num_intervals)
    return t_quantile((1 - level) / 2, degrees_of_freedom)
