"""Ratios of totals over the units of one run, such as a speed-up over prompts or laps: intervals, drift, and units that
stand out.

Errors are found over subsets of the units. Ratios over several runs are in `statistics/runs.py`.
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

# From one draw of so many subsets to another the ends of an interval differ by less than 1 % of its width.
_NUM_SUBSETS = 10_000
# Numbers in memory at once, so that subsets of thousands of prompts stay under about 100 MB.
_NUMBERS_AT_ONCE = 2_000_000
# Differences of this size are those of floating point.
_ROUNDING = 1e-9
# One or two units are named that hold this share of the variance, and took this many times as long as the others.
_MOST_OF_THE_VARIANCE = 0.7
_MUCH_LONGER = 2
# A half of a run is compared with the other from so many units on, and from so many in effect.
_FEWEST_IN_HALF = 3
_FEWEST_IN_EFFECT = 2
# A drift up to this share does not matter.
_TOLERATED_DRIFT = 0.02


@dataclass(frozen=True)
class RatioEstimate:
    """The log of a ratio, and the two parts of its variance, each with its own degrees of freedom.

    Those of the sum are Satterthwaite's (1946).

    Attributes:
        log_ratio: natural logarithm of the ratio; nan without units.
        covers: the choices that an interval of this estimate allows for.
        unit_variance: from the choice of units; nan where they are too few.
        unit_degrees_of_freedom: of that.
        run_variance: from run to run, and from what varies within runs.
        run_degrees_of_freedom: of `run_variance`; 0 where no run was repeated.
    """

    log_ratio: float
    covers: Coverage
    unit_variance: float = NAN
    unit_degrees_of_freedom: float = 1
    run_variance: float = 0.0
    run_degrees_of_freedom: float = 0

    @property
    def standard_error(self) -> float:
        """Standard error of the log of the ratio; nan where units are too few."""
        return math.sqrt(self.unit_variance + self.run_variance)

    @property
    def degrees_of_freedom(self) -> float:
        spread = self.unit_variance**2 / self.unit_degrees_of_freedom
        if self.run_degrees_of_freedom:
            spread += self.run_variance**2 / self.run_degrees_of_freedom
        return (self.unit_variance + self.run_variance) ** 2 / spread if spread else math.inf

    def interval(self, confidence: float = CONFIDENCE) -> Interval:
        """The ratio with its interval by Student's t; bounds are nan where units are too few. Rejections that the units
        may have missed (`covers.unseen`) move the lower bound alone.
        """
        quantile = t_quantile((1 - confidence) / 2, self.degrees_of_freedom)
        half_width = quantile * self.standard_error
        low = math.exp(self.log_ratio - math.hypot(half_width, self.covers.unseen))
        high = math.exp(self.log_ratio + half_width)
        return Interval(math.exp(self.log_ratio), low, high, self.covers)


@dataclass(frozen=True)
class Rare:
    """Units that hold most of the variance.

    Attributes:
        number: of these units.
        times: how many times as long as the others they took, in the arm in which they did.
        is_numerator: whether that is the arm of the numerators.
    """

    number: int
    times: float
    is_numerator: bool


class Rejections(NamedTuple):
    """Iterations of units, [num_units], and the fewest that could have given their tokens."""

    iterations: Floats
    fewest: Floats

    def noted_in(self, covers: Coverage) -> Coverage:
        """The coverage of these units, with what rejections that they do not show may add.

        Where a draft is hardly ever rejected, few units have iterations beyond the fewest. Where these are less than
        half of the units, both counted as `effective_units`, they do not show how rejections vary. The long run may
        then have more such iterations: up to Poisson's upper bound of their number, or of the number of units with
        some, times the mean of these (Garwood 1936). `unseen` is the log by which the iterations would grow.
        """
        beyond = np.maximum(self.iterations - self.fewest, 0.0)
        total = float(beyond.sum())
        num_rejecting = effective_units(beyond) if total else 0.0
        if 2 * num_rejecting >= effective_units(self.iterations):
            return covers
        from scipy import special

        # Quantiles of Poisson's distribution are those of the gamma distribution.
        most = special.gammaincinv(np.array([total, num_rejecting]) + 1, (1 + CONFIDENCE) / 2)
        mean = total / num_rejecting if total else 1.0
        most_beyond = max(float(most[0]), float(most[1]) * mean)
        unseen = math.log1p((most_beyond - total) / (float(self.fewest.sum()) + total))
        return replace(covers, num_rejecting=int(np.count_nonzero(beyond)), unseen=unseen)


def ratio_of_totals(
    numerators: ArrayLike,
    denominators: ArrayLike,
    unit: str = "prompt",
    confidence: float = CONFIDENCE,
    lengths: Floats | None = None,
    rejections: Rejections | None = None,
) -> Interval:
    """The product of some totals over the product of others, with the interval of `ratio_estimate`.

    Of one total over one other no bound is beyond the ratios of the single units: tokens per iteration stay below
    K + 1. That costs at most 3 % of coverage over 8 units, and nothing over 15.

    Returns:
        The ratio and its bounds; bounds are nan where units are too few, everything is nan without units.
    """
    estimate = ratio_estimate(numerators, denominators, unit, lengths, rejections)
    interval = estimate.interval(confidence)
    of_units = np.divide(numerators, denominators)
    num_totals, size = of_units.shape
    if num_totals > 1 or size < FEWEST_FOR_INTERVAL:
        return interval
    low = interval.low
    if not estimate.covers.unseen:
        # Rounding may put the ratio of equal units just outside of them.
        low = min(max(low, float(of_units.min())), interval.estimate)
    high = max(min(interval.high, float(of_units.max())), interval.estimate)
    return Interval(interval.estimate, low, high, interval.covers)


def ratio_estimate(
    numerators: ArrayLike,
    denominators: ArrayLike,
    unit: str = "prompt",
    lengths: Floats | None = None,
    rejections: Rejections | None = None,
) -> RatioEstimate:
    """The product of some totals over the product of others, and how far it is off for the choice of units.

    A speed-up is one total over another. The time of an iteration in regular steps has two of each: its ms
    and the regular tokens, over iterations and regular ms. A unit is whatever is independent of the others: a prompt,
    or a lap of requests that were in flight together (`totals_by_unit`).

    The ratios over random subsets of the units are as often above as below the truth (Hartigan, "Using Subsample Values
    as Typical Values", 1969), exactly so where swapping the arms of a unit changes nothing but the sign of its part:
    for stalls that hit both arms alike, too. Where they are skewed, the farther one of the two 95 % bounds counts on
    both sides, as a sample without the rare units of a tail does not show it. Where few long answers make up most of a
    total, there are only (Σ n)² / Σ n² units in effect (Kish, 1965), n being the denominators; so that distance, in
    Student's quantiles for all units, is the standard error, and its degrees of freedom are those of effective units.

    In simulations of 8, 15 and 30 prompts (`benchmarks/intervals.py`) such intervals of 95 % held in 92 to 99 %: with
    lengths that vary by a factor of 2.2 and are correlated with the gain by up to 0.5, with stalls of both arms, and
    with answers that end by themselves; `docs/numbers.md` has stronger correlations and tails. A percentile bootstrap
    held in 84 to 95 %, Student's t with a correction for skewness in 82 to 96 %.

    Of fewer than `FEWEST_FOR_INTERVAL` units it is `jackknife_estimate`, which has bounds over blocks alone.

    Args:
        numerators, denominators: [num_totals, num_units], not negative; no bounds follow from denominators of 0.
        lengths: [num_units], how long the units' answers are, where that differs: with fewer than `FEWEST_EFFECTIVE`
            effective units there is no interval.
        rejections: of the units, where the denominators are iterations, or times of them.
    """
    tops, bottoms = np.array([numerators, denominators], dtype=np.float64)
    size = tops.shape[1]
    if size < FEWEST_FOR_INTERVAL:
        return jackknife_estimate(tops, bottoms, unit)
    covers = Coverage(size, unit)
    if rejections is not None:
        covers = rejections.noted_in(covers)
    log_ratio = _log_ratio(tops, bottoms)
    # By lengths, whether there is an interval; its degrees of freedom follow from the denominators.
    num_effective = size if lengths is None else round(effective_units(lengths))
    if 2 * num_effective < size:
        covers = replace(covers, num_effective=num_effective)
    if num_effective < FEWEST_EFFECTIVE:
        return RatioEstimate(log_ratio, covers)
    logs = np.sort(_over_subsets(tops, bottoms))
    # N ratios cut the line into N + 1 parts, in each of which the truth is equally often.
    beyond = int((logs.size + 1) * (1 - CONFIDENCE) / 2)
    distance = max(log_ratio - logs[beyond - 1], logs[-beyond] - log_ratio)
    error = float(distance) / t_quantile((1 - CONFIDENCE) / 2, size - 1)
    return RatioEstimate(log_ratio, covers, error**2, _freedom(bottoms))


def jackknife_estimate(
    numerators: ArrayLike, denominators: ArrayLike, unit: str = "prompt"
) -> RatioEstimate:
    """The same by Student's t of what each unit adds to the logarithm (`influences`)."""
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
    """Degrees of freedom over effective units, by the first of the denominators."""
    return max(effective_units(bottoms[0]) - 1, 1)


def effective_units(lengths: Floats) -> float:
    """How many units of equal length vary as these do, (Σ n)² / Σ n² (Kish, 1965)."""
    return float(lengths.sum() ** 2 / np.square(lengths).sum())


def influences(numerators: ArrayLike, denominators: ArrayLike) -> Floats:
    """What each unit adds to the log of a ratio of totals, [num_units]; the mean is 0.

    By the jackknife: the change when the unit is left out. To first order it would be too small where some units are
    much longer than others: a long unit pulls the total towards itself.

    Args:
        numerators, denominators: [num_totals, num_units], see `ratio_estimate`; at least two units.
    """
    tops, bottoms = np.asarray(numerators, float), np.asarray(denominators, float)
    without = np.log(tops.sum(axis=1, keepdims=True) - tops).sum(axis=0)
    without -= np.log(bottoms.sum(axis=1, keepdims=True) - bottoms).sum(axis=0)
    return np.asarray((without.size - 1) * (without.mean() - without))


def _over_subsets(tops: Floats, bottoms: Floats) -> Floats:
    """The log ratio of totals over random subsets of the units: all of them where these are fewer."""
    size = tops.shape[1]
    if 2**size - 1 <= _NUM_SUBSETS:
        # The bits of each number are a subset.
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
        members: [num_sets, num_units], 1 for the units of a set and 0 for others.
    """
    chosen = np.asarray(members, dtype=np.float64)
    # A set without a numerator has a ratio of 0, which is as far below as any.
    with np.errstate(divide="ignore"):
        logs = np.log(chosen @ tops.T).sum(axis=1) - np.log(chosen @ bottoms.T).sum(axis=1)
    return np.asarray(logs)


def totals_by_unit(values: ArrayLike, units: Sequence[Hashable]) -> Floats:
    """Sums of the values of each unit, such as of the requests of a lap, in the order of the units.

    Args:
        values: [num_values], such as the tokens of each request.
        units: [num_values], the unit that each value belongs to; they are ordered as they appear.

    Returns:
        [num_units].
    """
    places = {unit: index for index, unit in enumerate(dict.fromkeys(units))}
    indices = np.array([places[unit] for unit in units], dtype=np.intp)
    return np.asarray(np.bincount(indices, weights=values))


def at_equal_lengths(times: ArrayLike, tokens: ArrayLike) -> Floats:
    """Times per token of several arms by unit, as if all arms had given a unit's answers the same lengths.

    The mean of an arm's values is its total time over its total tokens, so that ratios of totals of these are ratios of
    times per token over all tokens, in which a token weighs the same in a long answer and in a short one. Of a unit
    with n times the arm's mean number of tokens and a time of t times its mean the value is

        time per token of the arm × (t + ν - n),   ν = mean of n over the arms

    t - n is what the unit adds to the log of the arm's time per token, to first order, and ν cancels between arms: what
    an arm's answers are longer by chance, where texts are drawn, is no part of the variance. Where all arms gave a
    unit's answers the same lengths, as greedy decoding does, ν = n, and the values are times over the mean number of
    tokens; where all answers have one length, times over that length.

    Args:
        times: [num_arms, num_units], positive, such as ms of the regular and the speculative arm.
        tokens: [num_arms, num_units], positive: tokens that the times were spent on.

    Returns:
        [num_arms, num_units], positive: at least a tenth of the time over the mean number of tokens; values that are
        raised to it leave the arm's mean as it is, to which all are scaled.
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


def rare_units(
    numerators: ArrayLike, denominators: ArrayLike, lengths: ArrayLike = 1.0
) -> Rare | None:
    """The one or two units of at least `FEWEST_FOR_INTERVAL` that hold most of the variance of a ratio of totals, and
    took much longer than the others in an arm, for their lengths: such as answers that stalled. None where there are
    none.

    Args:
        numerators, denominators: [num_units], such as ms of both arms.
        lengths: [num_units], how long the units' answers are; one value for equal ones.
    """
    tops, bottoms = np.array([numerators, denominators], dtype=np.float64)
    relative = np.asarray(lengths, dtype=np.float64)
    arms = (tops / relative, bottoms / relative)
    if tops.size < FEWEST_FOR_INTERVAL or not tops.all():
        return None
    shares = np.square(influences([tops], [bottoms]))
    if shares.sum() < _ROUNDING:
        return None
    order = np.argsort(-shares)
    for number in (1, 2):
        rare = order[:number]
        if shares[rare].sum() < _MOST_OF_THE_VARIANCE * shares.sum():
            continue
        others = order[number:]
        times = [float(arm[rare].mean() / np.median(arm[others])) for arm in arms]
        slower = int(np.argmax(times))
        if times[slower] < _MUCH_LONGER:
            return None
        return Rare(number, times[slower], is_numerator=slower == 0)
    return None


def drift(numerators: ArrayLike, denominators: ArrayLike, unit: str = "prompt") -> Interval:
    """The ratio of totals in the second half of the units over that in the first.

    The halves are compared by Welch's t-test (1947) on what each unit adds to the log of its half's
    ratio, from six units on. Of a quiet machine about 5 % of the runs show a drift that matters, up to 7 % at lengths
    from 15 to 400 tokens, of 7 units as of 40. Where one long answer makes up most of a half, no drift is stated.

    Args:
        numerators: [num_units], positive, in the order in which they were measured, such as ms of an arm.
        denominators: [num_units], positive, such as ms of the other arm: a drift of the speed-up.

    Returns:
        The second half over the first; bounds are nan where a half has too few units, or too few in effect by its
        denominators.
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
    added = [influences([top], [bottom]) for top, bottom in halves]
    low, high = _welch_interval(added[0], added[1], change)
    return Interval(math.exp(change), math.exp(low), math.exp(high), covers)


def drift_matters(change: Interval) -> bool:
    """Whether a drift is significant and larger than what is tolerated."""
    return change.excludes(1) and abs(change.estimate - 1) > _TOLERATED_DRIFT


def _welch_interval(first: Floats, second: Floats, difference: float) -> tuple[float, float]:
    """Interval of a difference of means, second minus first, around the given difference."""
    if not first.any() and not second.any():
        return difference, difference
    from scipy import stats

    test = stats.ttest_ind(second, first, equal_var=False)
    around_means = test.confidence_interval(CONFIDENCE)
    shift = difference - (second.mean() - first.mean())
    return float(around_means.low + shift), float(around_means.high + shift)
