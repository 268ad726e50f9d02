"""Ratios of totals over the units of one run, such as a speed-up over prompts or laps: intervals, drift, and units that
stand out.

Standard errors are computed from the ratios over random subsets of the units. Ratios over several runs are in
`statistics/runs.py`.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from harness.results.statistics import Floats
from harness.results.statistics.interval import (
    CONFIDENCE,
    FEWEST_EFFECTIVE,
    FEWEST_FOR_INTERVAL,
    NAN,
    Coverage,
    Interval,
    fewest_units,
    t_quantile,
)

# With this many random subsets, the bounds of an interval vary by less than 1 % of its width from one drawing of
# subsets to another.
_NUM_SUBSETS = 10_000
# The most numbers that are in memory at once. With it, subsets of thousands of prompts take less than about 100 MB.
_NUMBERS_AT_ONCE = 2_000_000
# The halves of a run are compared if each has at least this many units, and this many effective units
# (`effective_units`).
_FEWEST_IN_HALF = 3
_FEWEST_IN_EFFECT = 2
# A drift of at most this share of the speed-up is ignored.
_TOLERATED_DRIFT = 0.02


@dataclass(frozen=True)
class RatioEstimate:
    """The log of a ratio, and the two parts of its variance, each with its own degrees of freedom.

    Satterthwaite's formula (1946) gives the degrees of freedom of the sum of the two parts.

    Attributes:
        log_ratio: natural logarithm of the ratio; nan without units.
        covers: the choices that an interval of this estimate covers.
        unit_variance: variance from the choice of units; nan if there are too few units.
        unit_degrees_of_freedom: the degrees of freedom of `unit_variance`.
        run_variance: variance between runs, including that of everything that varies within a run; 0 for a single run.
        run_degrees_of_freedom: the degrees of freedom of `run_variance`; 0 if no run was repeated.
    """

    log_ratio: float
    covers: Coverage
    unit_variance: float = NAN
    unit_degrees_of_freedom: float = 1
    run_variance: float = 0.0
    run_degrees_of_freedom: float = 0

    @property
    def standard_error(self) -> float:
        """Standard error of the log of the ratio; nan if there are too few units."""
        return math.sqrt(self.unit_variance + self.run_variance)

    @property
    def degrees_of_freedom(self) -> float:
        spread = self.unit_variance**2 / self.unit_degrees_of_freedom
        if self.run_degrees_of_freedom:
            spread += self.run_variance**2 / self.run_degrees_of_freedom
        return (self.unit_variance + self.run_variance) ** 2 / spread if spread else math.inf

    def interval(self, confidence: float = CONFIDENCE) -> Interval:
        """The ratio with its Student's t interval; the bounds are nan if there are too few units.

        Rejections that the units may have missed (`covers.unseen`) lower the lower bound; they do not change the upper
        bound.
        """
        covers, freedom = self.covers, self.degrees_of_freedom
        if covers.num_runs and math.isfinite(freedom):
            covers = replace(covers, degrees_of_freedom=round(freedom, 2))
        quantile = t_quantile((1 - confidence) / 2, freedom)
        half_width = quantile * self.standard_error
        low = math.exp(self.log_ratio - math.hypot(half_width, covers.unseen))
        high = math.exp(self.log_ratio + half_width)
        return Interval(math.exp(self.log_ratio), low, high, covers)


class ExtraIterations(NamedTuple):
    """The number of iterations of each unit, [num_units], and the fewest iterations that its tokens need: their number
    if no draft token is rejected. The difference is the unit's *extra* iterations.
    """

    iterations: Floats
    fewest: Floats

    def noted_in(self, covers: Coverage) -> Coverage:
        """Return the coverage of these units, with the effect of rejections that they may have missed.

        If draft tokens are hardly ever rejected, few units have extra iterations. If both the number of these units and
        their `effective_units` are less than half of the `effective_units` of all, they do not show how rejections
        vary, and in the long run there may be more extra iterations. Two upper bounds of their number are computed, and
        the larger counts: Poisson's upper bound of the number of extra iterations (Garwood 1936); and Poisson's upper
        bound of the number of units with extra iterations, times the mean number in such a unit. `unseen` is the log of
        the factor by which the total of iterations would grow.

        For example, 15 units need at least 10 iterations each, and one of them has 2 extra iterations. The first bound
        is 7.2 extra iterations, the second is 5.6 units times 2. So the total may grow from 152 to 161 iterations.

        Args:
            covers: the coverage of the units; it is returned unchanged if enough units have extra iterations.
        """
        beyond = np.maximum(self.iterations - self.fewest, 0.0)
        total = float(beyond.sum())
        # The threshold is not 0, because for `acceptance` iterations are expected values, so that nearly every unit has
        # a fraction of an extra iteration.
        num_rejecting = int(np.count_nonzero(beyond >= 0.5))
        in_effect = effective_units(beyond) if total else 0.0
        if 2 * max(num_rejecting, in_effect) >= effective_units(self.iterations):
            return covers
        from scipy import special

        # Quantiles of Poisson's distribution are those of the gamma distribution.
        most = special.gammaincinv(np.array([total, in_effect]) + 1, (1 + CONFIDENCE) / 2)
        mean = total / in_effect if total else 1.0
        most_beyond = max(float(most[0]), float(most[1]) * mean)
        unseen = math.log1p((most_beyond - total) / (float(self.fewest.sum()) + total))
        return replace(covers, num_rejecting=num_rejecting, unseen=unseen)


def ratio_of_totals(
    numerators: ArrayLike,
    denominators: ArrayLike,
    unit: str = "prompt",
    confidence: float = CONFIDENCE,
    lengths: Floats | None = None,
    extra_iterations: ExtraIterations | None = None,
) -> Interval:
    """The product of some totals divided by the product of others, with the interval of `ratio_estimate`.

    For one total divided by another, the bounds are limited to the range of the single units' ratios, so that tokens
    per iteration stay below K + 1. The limit lowers how often the interval contains the true ratio by at most 3 % for 8
    units, and not at all for 15 units. With rejections that the units may have missed (`Coverage.unseen`), the lower
    bound has no limit.

    Returns:
        The ratio and its bounds. With too few units, the bounds are nan; without units, the ratio is nan, too.
    """
    estimate = ratio_estimate(numerators, denominators, unit, lengths, extra_iterations)
    interval = estimate.interval(confidence)
    of_units = np.divide(numerators, denominators)
    num_totals, size = of_units.shape
    if num_totals > 1 or size < FEWEST_FOR_INTERVAL:
        return interval
    low = interval.low
    if not estimate.covers.unseen:
        # If all units have the same ratio, rounding may put the estimate just outside their range.
        low = min(max(low, float(of_units.min())), interval.estimate)
    high = max(min(interval.high, float(of_units.max())), interval.estimate)
    return Interval(interval.estimate, low, high, interval.covers)


def ratio_estimate(
    numerators: ArrayLike,
    denominators: ArrayLike,
    unit: str = "prompt",
    lengths: Floats | None = None,
    extra_iterations: ExtraIterations | None = None,
) -> RatioEstimate:
    """The product of some totals divided by the product of others, and its error from the choice of units.

    A speed-up is one total divided by another. The cost of an iteration in regular steps is a product of two totals
    (milliseconds of iterations, number of regular tokens) divided by a product of two totals (number of iterations,
    milliseconds of regular decoding). A unit is the smallest group of answers that is independent of the others: a
    prompt, or a lap of requests that were in flight together (`totals_by_unit`).

    The error is computed in three steps:

    1. The ratios over random subsets of the units lie above the true ratio as often as below it (Hartigan, "Using
       Subsample Values as Typical Values", 1969). This is exact if swapping the arms of a unit only changes the sign of
       the unit's contribution; so it is also exact for stalls that are equally likely in both arms.
    2. If the ratios are skewed, the more distant of the two 95 % bounds is used on both sides, because a sample without
       the rare units of a tail does not show the tail. The standard error is the distance of this bound, divided by
       Student's quantile for all units.
    3. If a few long answers make up most of a total, only (Σ n)² / Σ n² units are *effective* (Kish, 1965), where n are
       the denominators. They determine the degrees of freedom.

    In simulations of 8, 15 and 30 prompts (`benchmarks/intervals.py`), such 95 % intervals contained the ratio in 92 to
    99 % of the cases. In these simulations, lengths varied by a factor of 2.2, and were correlated with the gain by up
    to 0.5; both arms stalled at times; and answers ended by themselves. `docs/numbers.md` reports stronger correlations
    and tails. Intervals of a percentile bootstrap contained the ratio in 84 to 95 % of the cases, and Student's t
    intervals with a correction for skewness in 82 to 96 %.

    With fewer than `FEWEST_FOR_INTERVAL` units, the result is that of `jackknife_estimate`, which then has an error
    only if the units are blocks.

    Args:
        numerators, denominators: [num_totals, num_units], not negative. A few units may have a denominator of 0; if
            many have, totals over subsets are 0, and there are no bounds.
        unit: the name of a unit in the coverage.
        lengths: [num_units], the lengths of the units' answers. If fewer than `FEWEST_EFFECTIVE` units are effective,
            there is no interval. None for equal lengths.
        extra_iterations: the iterations of each unit, if the denominators are iterations or their times; None
            otherwise, or if they are not known.
    """
    tops, bottoms = np.array([numerators, denominators], dtype=np.float64)
    size = tops.shape[1]
    if size < FEWEST_FOR_INTERVAL:
        return jackknife_estimate(tops, bottoms, unit)
    covers = Coverage(size, unit)
    if extra_iterations is not None:
        covers = extra_iterations.noted_in(covers)
    log_ratio = _log_ratio(tops, bottoms)
    # The lengths determine whether there is an interval. Its degrees of freedom are determined by the denominators.
    num_effective = size if lengths is None else round(effective_units(lengths))
    if 2 * num_effective < size:
        covers = replace(covers, num_effective=num_effective)
    if num_effective < FEWEST_EFFECTIVE:
        return RatioEstimate(log_ratio, covers)
    logs = np.sort(_over_subsets(tops, bottoms))
    # N ratios divide the line into N + 1 parts, and each part contains the true ratio with the same probability.
    beyond = int((logs.size + 1) * (1 - CONFIDENCE) / 2)
    distance = max(log_ratio - logs[beyond - 1], logs[-beyond] - log_ratio)
    error = float(distance) / t_quantile((1 - CONFIDENCE) / 2, size - 1)
    return RatioEstimate(log_ratio, covers, error**2, _freedom(bottoms))


def jackknife_estimate(
    numerators: ArrayLike, denominators: ArrayLike, unit: str = "prompt"
) -> RatioEstimate:
    """The ratio of `ratio_estimate`, with the standard error of the mean of the units' contributions to its logarithm
    (`influences`).

    The error is nan with fewer than `fewest_units(unit)` units, and the ratio is nan without units.
    """
    tops, bottoms = np.array([numerators, denominators], dtype=np.float64)
    size = tops.shape[1]
    covers = Coverage(size, unit)
    if not size:
        return RatioEstimate(NAN, covers)
    log_ratio = _log_ratio(tops, bottoms)
    if size < fewest_units(unit):
        return RatioEstimate(log_ratio, covers)
    variance = float(influences(tops, bottoms).var(ddof=1)) / size
    return RatioEstimate(log_ratio, covers, variance, _freedom(bottoms))


def _log_ratio(tops: Floats, bottoms: Floats) -> float:
    return float(_log_ratios(np.ones((1, tops.shape[1])), tops, bottoms)[0])


def _freedom(bottoms: Floats) -> float:
    """The number of effective units, according to the first denominator, minus 1; at least 1."""
    return max(effective_units(bottoms[0]) - 1, 1)


def effective_units(lengths: Floats) -> float:
    """The number of units of equal length that would vary as much as these units, (Σ n)² / Σ n² for lengths n (Kish,
    1965).
    """
    return float(lengths.sum() ** 2 / np.square(lengths).sum())


def influences(numerators: ArrayLike, denominators: ArrayLike) -> Floats:
    """The contribution of each unit to the log of a ratio of totals, [num_units]; their mean is 0.

    The contributions are found by the jackknife: from the change of the ratio if the unit is left out. If some units
    are much longer than others, a first-order formula would underestimate the contributions, because a long unit pulls
    the total towards itself.

    Args:
        numerators, denominators: [num_totals, num_units], as in `ratio_estimate`, of at least two units.
    """
    tops, bottoms = np.asarray(numerators, float), np.asarray(denominators, float)
    without = np.log(tops.sum(axis=1, keepdims=True) - tops).sum(axis=0)
    without -= np.log(bottoms.sum(axis=1, keepdims=True) - bottoms).sum(axis=0)
    return np.asarray((without.size - 1) * (without.mean() - without))


def _over_subsets(tops: Floats, bottoms: Floats) -> Floats:
    """The log ratios of totals over `_NUM_SUBSETS` random subsets of the units; over all subsets if there are no more
    than that.
    """
    size = tops.shape[1]
    if 2**size - 1 <= _NUM_SUBSETS:
        # Each number is a subset; its bits show which units belong to it.
        every = np.arange(1, 2**size)[:, None] >> np.arange(size) & 1
        return _log_ratios(every, tops, bottoms)
    rng = np.random.default_rng(0)
    at_once = max(1, _NUMBERS_AT_ONCE // size)
    logs = []
    for first in range(0, _NUM_SUBSETS, at_once):
        drawn = rng.integers(0, 2, (min(at_once, _NUM_SUBSETS - first), size), dtype=np.int8)
        logs.append(_log_ratios(drawn[drawn.any(axis=1)], tops, bottoms))
    return np.concatenate(logs)


def _log_ratios(members: ArrayLike, tops: Floats, bottoms: Floats) -> Floats:
    """The log of the ratio of totals over each set of units, [num_sets].

    Args:
        members: [num_sets, num_units], 1 for the units of a set and 0 for the others.
    """
    chosen = np.asarray(members, dtype=np.float64)
    # If all numerators of a set are 0, its ratio is 0, and the log -inf, which lies below all others.
    with np.errstate(divide="ignore"):
        logs = np.log(chosen @ tops.T).sum(axis=1) - np.log(chosen @ bottoms.T).sum(axis=1)
    return np.asarray(logs)


def totals_by_unit(values: ArrayLike, units: Sequence[Hashable]) -> Floats:
    """The sum of the values of each unit, such as the tokens of all requests of a lap.

    For example, the values [1, 2, 3] of the units ["b", "a", "b"] give [4, 2].

    Args:
        values: [num_values], such as the tokens of each request.
        units: [num_values], the unit that each value belongs to.

    Returns:
        [num_units], in the order in which the units first appear.
    """
    places = {unit: index for index, unit in enumerate(dict.fromkeys(units))}
    indices = np.array([places[unit] for unit in units], dtype=np.intp)
    return np.asarray(np.bincount(indices, weights=values))


def at_equal_lengths(times: ArrayLike, tokens: ArrayLike) -> Floats:
    """Length-adjusted times of several arms by unit, as if a unit's answers had the same lengths in all arms.

    The mean of an arm's values is the arm's time per token: its total time divided by its total tokens. So a token
    counts the same in a long answer and in a short one. A single value is not a time per token. For a unit with n times
    the arm's mean number of tokens, and t times the arm's mean time, the value is

        time per token of the arm × (t + ν - n),   ν = mean of n over the arms

    To first order, t - n is the unit's contribution to the log of the arm's time per token. ν is the same in all arms,
    so it cancels in their ratio. So the variance does not include the random differences in length that sampling
    causes. For example, two arms have 10 and 5 ms per token, and their answers differ in length. The ratio of the
    values is 2 in every unit:

        tokens    [10, 30] and [20, 20]
        times     [100, 300] and [100, 100]
        values    [7.5, 12.5] and [3.75, 6.25]

    If a unit's answers have the same lengths in all arms, as in greedy decoding, then ν = n, and the values are the
    times divided by the arm's mean number of tokens.

    Args:
        times: [num_arms, num_units], positive, such as ms of the regular and the speculative arm.
        tokens: [num_arms, num_units], positive: the tokens that the times were spent on.

    Returns:
        [num_arms, num_units], positive. Values below a limit are raised to it: a tenth of the unit's time divided by
        the arm's mean number of tokens. All values of the arm are then scaled so that their mean does not change.
    """
    table = np.asarray(times, dtype=np.float64)
    lengths = np.asarray(tokens, dtype=np.float64)
    if table.shape[-1] == 0:
        return table
    mean_lengths = lengths.mean(axis=1, keepdims=True)
    plain = table / mean_lengths
    per_token = plain.mean(axis=1, keepdims=True)
    relative = lengths / mean_lengths
    values = plain + per_token * (relative.mean(axis=0) - relative)
    least = 0.1 * plain
    if (values < least).any():
        values = np.maximum(values, least)
        values *= per_token / values.mean(axis=1, keepdims=True)
    return np.asarray(values)


def drift(numerators: ArrayLike, denominators: ArrayLike, unit: str = "prompt") -> Interval:
    """The ratio of totals in the second half of the units, divided by the ratio in the first half.

    The halves are compared by Welch's t-test (1947) on the contributions of units to the log of their half's ratio
    (`influences`). On an idle machine, about 5 % of the runs show a drift that matters, with 7 units as with 40; if
    answers have 15 to 400 tokens, up to 7 % of the runs do.

    Args:
        numerators: [num_units], positive, in the order in which they were measured, such as ms of an arm.
        denominators: [num_units], positive, such as ms of the other arm, for a drift of the speed-up.
        unit: the name of a unit in the coverage.

    Returns:
        The change, with an interval. The bounds are nan with fewer than six units, or if one long answer makes up most
        of a half. All nan with fewer than two units.
    """
    tops, bottoms = np.array([numerators, denominators], dtype=np.float64)
    half = tops.size // 2
    if not half:
        return Interval()
    halves = [(tops[:half], bottoms[:half]), (tops[half:], bottoms[half:])]
    log_ratios = [math.log(top.sum() / bottom.sum()) for top, bottom in halves]
    change = log_ratios[1] - log_ratios[0]
    covers = Coverage(tops.size, unit)
    in_effect = min(effective_units(bottom) for _, bottom in halves)
    if half < _FEWEST_IN_HALF or in_effect < _FEWEST_IN_EFFECT:
        return Interval(math.exp(change), covers=covers)
    first, second = (influences([top], [bottom]) for top, bottom in halves)
    low, high = _welch_interval(first, second, change)
    return Interval(math.exp(change), math.exp(low), math.exp(high), covers)


def drift_matters(change: Interval) -> bool:
    """Whether a drift is significant, and larger than `_TOLERATED_DRIFT`."""
    return change.excludes(1) and abs(change.estimate - 1) > _TOLERATED_DRIFT


def _welch_interval(first: Floats, second: Floats, difference: float) -> tuple[float, float]:
    """The interval of a difference of means, second minus first, shifted so that it is centred on the given
    difference.
    """
    if not first.any() and not second.any():
        return difference, difference
    from scipy import stats

    test = stats.ttest_ind(second, first, equal_var=False)
    around_means = test.confidence_interval(CONFIDENCE)
    shift = difference - (second.mean() - first.mean())
    return float(around_means.low + shift), float(around_means.high + shift)
