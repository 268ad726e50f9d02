"""Ratios of totals over the units of one run, such as a speed-up over prompts or laps.

Their intervals are bootstrapped. Those over several runs are in `runs.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike

from harness.results.statistics.arrays import Floats
from harness.results.statistics.distributions import t_quantile
from harness.results.statistics.interval import (
    CONFIDENCE,
    FEWEST_FOR_INTERVAL,
    Coverage,
    Interval,
    fewest_units,
)

# Resampled values held in memory at once, so that a bootstrap over thousands of prompts stays
# under about 100 MB.
_RESAMPLED_VALUES_AT_ONCE = 2_000_000
# From seed to seed the ends of an interval differ by less than 1 % of its width.
NUM_RESAMPLES = 10_000
# Differences of this size are those of floating point.
_ROUNDING = 1e-9
# Of one or two units, which are then named where they took this many times as long as the others.
_MOST_OF_THE_VARIANCE = 0.7
_MUCH_LONGER = 2
# A drift up to this share does not matter.
_TOLERATED_DRIFT = 0.02


@dataclass(frozen=True)
class Rare:
    """Units that hold most of the variance.

    Args:
        number: of these units.
        times: how many times as long as the others they took, in the arm in which they did.
        is_numerator: whether that is the arm of the numerators.
    """

    number: int
    times: float
    is_numerator: bool


def ratio_of_totals(
    numerators: ArrayLike,
    denominators: ArrayLike,
    num_resamples: int = NUM_RESAMPLES,
    seed: int = 0,
    confidence: float = CONFIDENCE,
    unit: str = "prompt",
) -> Interval:
    """sum(numerators) / sum(denominators) with a bootstrap interval over the units of one run.

    A resample draws units, so that a hard prompt affects both arms alike. The interval is the
    percentile interval with Hesterberg's small-sample expansion ("What Teachers Should Know about
    the Bootstrap", 2015): its levels are widened until the interval of a mean would match Student's
    t. In simulations with 15 prompts it covered the truth in 92 to 93 % of the cases, plain
    percentile and BCa intervals in 89 to 91 %.

    Where a stall hits one answer in ten, one or two units hold most of the variance, and a resample without them
    makes identical arms differ in 7 to 11 % of the runs. So the interval is no narrower than that of the ratios over
    random subsets of the units (Hartigan, "Using Subsample Values as Typical Values", 1969). That one is exact where
    swapping the arms of a unit, but for the true ratio, changes nothing: for any stalls that hit both arms alike. With
    stalls 3 to 6 % of identical arms differ, over 8 to 30 prompts (`benchmarks/stalls.py`).

    A unit is whatever is independent of the others: a prompt, or a lap of requests that were in
    flight together (`totals_by_unit`).

    Args:
        numerators: [num_units], such as ms of the regular arm.
        denominators: [num_units], positive, such as ms of the speculative arm.
        unit: what a unit is called, such as "prompt" or "lap".

    Returns:
        The ratio and its bounds; bounds are nan below `FEWEST_FOR_INTERVAL` units, everything is
        nan with none.
    """
    tops, bottoms = np.array([numerators, denominators], dtype=np.float64)
    covers = Coverage(tops.size, unit)
    if not tops.size:
        return Interval(covers=covers)

    def ratio(tops: Floats, bottoms: Floats, axis: int) -> Floats:
        return np.asarray(tops.sum(axis=axis) / bottoms.sum(axis=axis))

    estimate = float(ratio(tops, bottoms, axis=0))
    if tops.size < FEWEST_FOR_INTERVAL:
        return Interval(estimate, covers=covers)
    bounds = bootstrapped((tops, bottoms), ratio, num_resamples, seed, confidence)
    subset_bounds = _bounds_over_subsets(tops, bottoms, num_resamples, seed, confidence)
    low = min(bounds[0], subset_bounds[0])
    high = max(bounds[1], subset_bounds[1])
    return Interval(estimate, low, high, covers)


def log_ratio(
    numerators: Sequence[ArrayLike],
    denominators: Sequence[ArrayLike],
    unit: str = "prompt",
    confidence: float = CONFIDENCE,
    *,
    skewed: bool = False,
) -> Interval:
    """The product of some totals over the product of others, with Student's t of its linearised logarithm over units.

    A speed-up over blocks is one total over another. The time of an iteration in regular steps has two of each: its ms
    and the regular tokens, over iterations and regular ms. Unit i adds x_i to the logarithm: its share of each
    numerator's mean, less its share of each denominator's.

    Where few units have much of the variance, a sample without the rare units of their tail has too small a mean and
    too small a variance at once, and Student's t of it is skewed too. Hall's monotone cubic transformation of t takes
    that skewness out ("On the Removal of Skewness by Transformation", 1992), with Student's quantile in
    place of the normal one:

        g(t) = t + a (2 t² + 1) + 4/3 a² t³,   a = skewness of the x_i / (6 √n)

    The interval is that of the t for which g(t) lies between the quantiles. The cubic is inverted exactly:
    t = (∛(1 + 6 a (g - a)) - 1) / 2a.

    No such bound is beyond the ratios of the single units: where a quantity is bounded, as tokens per iteration are by
    K + 1, the cubic knows nothing of it. In simulations of 8 to 30 prompts that costs at most 1 % of coverage, and
    halves the widest intervals. What no unit has shown is not covered: of 8 prompts, where one in ten is much harder
    than the others, the interval holds in 77 to 96 % of the cases.

    Args:
        numerators, denominators: each [num_units] of the same units, not negative.
        skewed: whether t is corrected for skewness; then there is one total of each.

    Returns:
        The ratio and its bounds; bounds are nan below the fewest units that an interval of this unit needs, and of a
        ratio of 0; everything is nan without units, or where a denominator's total is 0.
    """
    tops = [np.asarray(values, dtype=np.float64) for values in numerators]
    bottoms = [np.asarray(values, dtype=np.float64) for values in denominators]
    size = tops[0].size
    covers = Coverage(size, unit)
    numerator = math.prod(float(values.sum()) for values in tops)
    denominator = math.prod(float(values.sum()) for values in bottoms)
    if not size or denominator <= 0:
        return Interval(covers=covers)
    ratio = numerator / denominator
    if size < fewest_units(unit) or ratio <= 0:
        return Interval(ratio, covers=covers)
    influences = np.zeros(size)
    for values in tops:
        influences += values / values.mean()
    for values in bottoms:
        influences -= values / values.mean()
    deviation = float(influences.std(ddof=1))
    if deviation < _ROUNDING:
        return Interval(ratio, ratio, ratio, covers)
    root = math.sqrt(size)
    bounds = np.array([1, -1]) * t_quantile((1 - confidence) / 2, size - 1)
    if not skewed:
        low, high = ratio * np.exp(-bounds * deviation / root)
        return Interval(ratio, float(low), float(high), covers)
    from scipy import stats

    a = float(stats.skew(influences, bias=False)) / (6 * root)
    if abs(a) > _ROUNDING:
        bounds = (np.cbrt(1 + 6 * a * (bounds - a)) - 1) / (2 * a)
    low, high = ratio * np.exp(-bounds * deviation / root)
    unit_ratios = tops[0] / bottoms[0]
    low = max(float(low), float(unit_ratios.min()))
    high = min(float(high), float(unit_ratios.max()))
    # Rounding may put the ratio of equal units just outside of them.
    return Interval(ratio, min(low, ratio), max(high, ratio), covers)


def _bounds_over_subsets(
    tops: Floats, bottoms: Floats, num_subsets: int, seed: int, confidence: float
) -> tuple[float, float]:
    """Quantiles of the ratio of totals over random subsets of the units: all of them where these are fewer."""
    size = tops.size
    ratios = []
    if 2**size - 1 <= num_subsets:
        members = np.arange(1, 2**size)[:, None] >> np.arange(size) & 1
        ratios.append((members @ tops) / (members @ bottoms))
    else:
        rng = np.random.default_rng(seed)
        at_once = max(1, _RESAMPLED_VALUES_AT_ONCE // size)
        for first in range(0, num_subsets, at_once):
            members = rng.integers(0, 2, (min(at_once, num_subsets - first), size), dtype=np.int8)
            members = members[members.any(axis=1)]
            ratios.append((members @ tops) / (members @ bottoms))
    ordered = np.sort(np.concatenate(ratios))
    # N ratios cut the line into N + 1 parts, in each of which the truth is equally often.
    beyond = max(1, int((ordered.size + 1) * (1 - confidence) / 2))
    return float(ordered[beyond - 1]), float(ordered[-beyond])


def bootstrapped(
    data: Sequence[Floats],
    statistic: Callable[..., Floats],
    num_resamples: int,
    seed: int,
    confidence: float,
) -> tuple[float, float]:
    """Bounds of a statistic of paired data [num_units], of `FEWEST_FOR_INTERVAL` units at least."""
    from scipy import stats

    size = data[0].size

    bounds = stats.bootstrap(
        data,
        statistic,
        paired=True,
        vectorized=True,
        method="percentile",
        n_resamples=num_resamples,
        batch=max(1, _RESAMPLED_VALUES_AT_ONCE // size),
        confidence_level=_expanded(confidence, size),
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return float(bounds.low), float(bounds.high)


def _expanded(confidence: float, size: int) -> float:
    """The percentile interval's level whose normal quantile is Student's, times √(n / (n − 1))."""
    quantile = t_quantile((1 - confidence) / 2, size - 1) * math.sqrt(size / (size - 1))
    return 2 * NormalDist().cdf(quantile) - 1


def totals_by_unit(values: ArrayLike, units: Sequence[Hashable]) -> Floats:
    """Sums of the values of each unit, such as of the requests of a lap, in the order of the units.

    Args:
        values: [num_values], such as ms per token of each request.
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
        [num_arms, num_units], positive: a value that would not be is a tenth of the time over the mean number of
        tokens, and the others of the arm are scaled so that its mean stays.
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
        numerators, denominators: [num_units], as of `ratio_of_totals`.
        lengths: [num_units], how long the units' answers are; one value for equal ones.
    """
    tops, bottoms = np.array([numerators, denominators], dtype=np.float64)
    relative = np.asarray(lengths, dtype=np.float64)
    arms = (tops / relative, bottoms / relative)
    if tops.size < FEWEST_FOR_INTERVAL or not tops.all():
        return None
    shares = np.square(tops / tops.mean() - bottoms / bottoms.mean())
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
    ratio. Of a quiet machine about 5 % of the runs show a drift that matters, up to 7 % at lengths from 15 to 400
    tokens. Where few long answers make up most of a half, no drift is stated.

    Args:
        numerators: [num_units], positive, in the order in which they were measured, such as ms of an arm.
        denominators: [num_units], positive, such as ms of the other arm: a drift of the speed-up.

    Returns:
        The second half over the first; bounds are nan where a half has fewer than `FEWEST_FOR_INTERVAL` effective
        units, (Σ n)² / Σ n² of its denominators n (Kish, 1965).
    """
    tops, bottoms = np.array([numerators, denominators], dtype=np.float64)
    half = tops.size // 2
    if not half:
        return Interval()
    halves = [(tops[:half], bottoms[:half]), (tops[half:], bottoms[half:])]
    log_ratios = [math.log(top.sum() / bottom.sum()) for top, bottom in halves]
    change = log_ratios[1] - log_ratios[0]
    covers = Coverage(tops.size, unit)
    effective = [bottom.sum() ** 2 / np.square(bottom).sum() for _, bottom in halves]
    if round(min(effective)) < FEWEST_FOR_INTERVAL:
        return Interval(math.exp(change), covers=covers)
    added = [top / top.mean() - bottom / bottom.mean() for top, bottom in halves]
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
