"""Intervals and tests: how sure a measured number is. Pure functions of counts and times.

A number that cannot be had is nan (an empty cell in a table), never 0. Arguments that make no sense at all, such as
more successes than trials, are a mistake of the calling code and raise ValueError.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

Floats = NDArray[np.float64]
NAN = float("nan")

# Resampled values held in memory at once, so that a bootstrap over thousands of prompts stays under about 100 MB.
_RESAMPLED_VALUES_AT_ONCE = 2_000_000


@dataclass(frozen=True)
class Interval:
    """An estimate with its confidence interval. All three are nan, or the bounds alone, where data do not suffice."""

    estimate: float
    low: float
    high: float


@dataclass(frozen=True)
class ChiSquare:
    """Outcome of `chi_square_test`. `num_cells` is counted after pooling; with one cell nothing could be tested."""

    statistic: float
    degrees_of_freedom: int
    p_value: float
    num_cells: int


def wald_interval(successes: int, total: int, confidence: float = 0.95) -> Interval:
    """Wald's interval of a proportion, p̂ ± z √(p̂ (1 − p̂) / n): the bound that published accuracy tables print.

    The bounds are not clipped to [0, 1], so that half their distance is the published ±. All nan when `total` is 0.
    """
    _check_counts(successes, total)
    if total == 0:
        return Interval(NAN, NAN, NAN)
    proportion = successes / total
    margin = _normal_quantile(confidence) * math.sqrt(proportion * (1 - proportion) / total)
    return Interval(proportion, proportion - margin, proportion + margin)


def wilson_interval(successes: int, total: int, confidence: float = 0.95) -> Interval:
    """Wilson's score interval of a proportion (1927), without continuity correction. All nan when `total` is 0.

    Unlike Wald's it stays inside [0, 1] and keeps a width when no trial or every trial succeeds.
    """
    _check_counts(successes, total)
    if total == 0:
        return Interval(NAN, NAN, NAN)
    bounds = stats.binomtest(successes, total).proportion_ci(confidence, method="wilson")
    return Interval(successes / total, float(bounds.low), float(bounds.high))


def ratio_of_totals(
    numerators: ArrayLike, denominators: ArrayLike, num_resamples: int, seed: int, confidence: float = 0.95
) -> Interval:
    """sum(numerators) / sum(denominators) with a paired bootstrap interval over prompts.

    The speed-up is the total regular time over the total speculative time: entry i of both arguments is prompt i, and
    a resample draws prompts, so that a hard prompt weighs on both arms alike.

    The interval is the percentile interval with Hesterberg's small-sample expansion ("What Teachers Should Know about
    the Bootstrap", 2015): the levels are widened until the interval of a mean would match Student's t. In simulations
    with 15 prompts the plain percentile and BCa intervals covered the truth in 89 to 91 % of the cases and this one in
    92 to 93 %; from 40 prompts on they agree within about 1 %. BCa gained nothing and is nan on constant data. With two
    prompts the interval is the range of the two, which no resampling can improve on.

    Args:
        numerators: [num_prompts], such as ms of the regular arm.
        denominators: [num_prompts], positive, such as ms of the speculative arm.
        num_resamples: bootstrap resamples.
        seed: the same seed and data give the same interval.
        confidence: coverage aimed at, in (0, 1).

    Returns:
        The ratio and its bounds; bounds are nan with one prompt, everything is nan with none.

    Raises:
        ValueError: when the two differ in length or a denominator is not positive.
    """
    tops, bottoms = np.asarray(numerators, dtype=np.float64), np.asarray(denominators, dtype=np.float64)
    if tops.ndim != 1 or tops.shape != bottoms.shape:
        raise ValueError(f"numerators {tops.shape} and denominators {bottoms.shape} must be two lists of one length")
    if not (bottoms > 0).all():
        raise ValueError("every denominator must be positive")
    if tops.size == 0:
        return Interval(NAN, NAN, NAN)
    estimate = float(tops.sum() / bottoms.sum())
    if tops.size == 1:
        return Interval(estimate, NAN, NAN)
    bounds = stats.bootstrap(
        (tops, bottoms),
        _ratio,
        paired=True,
        vectorized=True,
        method="percentile",
        n_resamples=num_resamples,
        batch=max(1, _RESAMPLED_VALUES_AT_ONCE // tops.size),
        confidence_level=_expanded_confidence(confidence, tops.size),
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return Interval(estimate, float(bounds.low), float(bounds.high))


def difference_of_paired_proportions(
    first_correct: Sequence[bool], second_correct: Sequence[bool], confidence: float = 0.95
) -> Interval:
    """Proportion correct of the second arm minus the first's on the same questions, with the paired Wald interval.

    Only questions that exactly one arm answers right widen it: √(b + c − (b − c)² / n) / n is the standard error
    (Agresti, Categorical Data Analysis, on matched pairs). All nan without questions.

    Raises:
        ValueError: when the two differ in length.
    """
    only_first, only_second, total = _discordant(first_correct, second_correct)
    if total == 0:
        return Interval(NAN, NAN, NAN)
    difference = (only_second - only_first) / total
    variance = only_first + only_second - (only_second - only_first) ** 2 / total
    margin = _normal_quantile(confidence) * math.sqrt(variance) / total
    return Interval(difference, difference - margin, difference + margin)


def mcnemar_p_value(only_first: int, only_second: int) -> float:
    """McNemar's exact two-sided p-value, from the questions that exactly one of two arms answers right.

    Under the null each such question falls to either arm like a fair coin. 1 when there are none.
    """
    if only_first < 0 or only_second < 0:
        raise ValueError(f"counts must not be negative: {only_first}, {only_second}")
    discordant = only_first + only_second
    return float(stats.binomtest(only_first, discordant, 0.5).pvalue) if discordant else 1.0


def chi_square_test(
    observed_counts: ArrayLike, expected_probabilities: ArrayLike, min_expected: float = 5
) -> ChiSquare:
    """Pearson's χ² test that draws came from a known distribution.

    Cells with an expected count under `min_expected` are pooled into one, and where that one is still under it, it
    takes in the smallest other cell. A draw from a cell of probability 0 refutes the distribution: the p-value is 0.

    The χ² approximation is too eager far out in the tail, and the more so the rarer a cell. For one cell of a two-cell
    test with an expected count of 5, 20, 100, 1000, a nominal false-alarm rate of 1e-9 is really 1e-6, 6e-8, 1e-8,
    1.5e-9 (exact binomial sums): a test at such a level wants `min_expected` of 100 or more.

    Args:
        observed_counts: [num_cells], how often each outcome was drawn.
        expected_probabilities: [num_cells], sums to 1 up to float32 rounding and is normalised here.

    Raises:
        ValueError: for shapes that differ, no draws, negative numbers, or probabilities that do not sum to 1.
    """
    counts = np.asarray(observed_counts, dtype=np.float64)
    probabilities = _distribution(expected_probabilities)
    if counts.shape != probabilities.shape:
        raise ValueError(f"{counts.shape} counts for {probabilities.shape} probabilities")
    if (counts < 0).any() or counts.sum() == 0:
        raise ValueError("counts must not be negative and there must be at least one draw")
    impossible = float(counts[probabilities == 0].sum())
    cells, num_cells = _pooled_cells(probabilities * counts.sum(), min_expected)
    if impossible:
        return ChiSquare(math.inf, num_cells - 1, 0.0, num_cells)
    observed, expected = _merge(counts, cells), _merge(probabilities * counts.sum(), cells)
    statistic = float(((observed - expected) ** 2 / expected).sum())
    if num_cells == 1:
        return ChiSquare(0.0, 0, 1.0, 1)
    return ChiSquare(statistic, num_cells - 1, chi_square_p_value(statistic, num_cells - 1), num_cells)


def chi_square_p_value(statistic: float, degrees_of_freedom: int, tolerated: float = 0.0) -> float:
    """Chance of a statistic at least this large; statistics of independent tests add up, and so does the rest.

    Args:
        tolerated: noncentrality that still passes for the null, number of draws times `chi_square_distance`: the
            p-value is then the largest that a distribution so far off could give.
    """
    return float(stats.ncx2.sf(statistic, degrees_of_freedom, tolerated)) if degrees_of_freedom else 1.0


def chi_square_tail_power(degrees_of_freedom: int, noncentrality: float, alpha: float, tolerated: float = 0.0) -> float:
    """Chance that `chi_square_p_value` falls below `alpha` when the statistic has this noncentrality."""
    if not degrees_of_freedom:
        return 0.0
    threshold = stats.ncx2.isf(alpha, degrees_of_freedom, tolerated)
    return float(stats.ncx2.sf(threshold, degrees_of_freedom, noncentrality))


def chi_square_distance(
    probabilities: ArrayLike, other_probabilities: ArrayLike, num_draws: int, min_expected: float = 5
) -> float:
    """Σ (other − p)² / p over the cells that `chi_square_test` would pool them into."""
    null, other = _distribution(probabilities), _distribution(other_probabilities)
    if null.shape != other.shape:
        raise ValueError(f"{null.shape} probabilities against {other.shape}")
    cells, _ = _pooled_cells(null * num_draws, min_expected)
    merged, merged_other = _merge(null, cells), _merge(other, cells)
    return float(((merged_other - merged) ** 2 / merged).sum())


def least_visible_shift(probabilities: ArrayLike, total_variation: float) -> Floats:
    """The distribution at this total-variation distance that a χ² test is nearly the worst at seeing.

    For a given distance Σ (other − p)² / p is least, 4 distance², when every probability changes by the same share. So
    the cells are dealt into two halves of about the same mass, of which the lighter gains what the heavier loses. With
    a single possible outcome there is nowhere to go, and the distribution comes back as it is.

    Raises:
        ValueError: for a distance that is not in (0, 0.5].
    """
    values = _distribution(probabilities)
    if not 0 < total_variation <= 0.5:
        raise ValueError(f"total_variation must lie in (0, 0.5]: {total_variation}")
    masses = [0.0, 0.0]
    half = np.zeros(values.size, dtype=np.intp)
    for index in np.argsort(-values, kind="stable"):
        half[index] = lighter = int(masses[1] < masses[0])
        masses[lighter] += float(values[index])
    gaining = half == int(masses[1] < masses[0])
    gained = values[gaining].sum()
    if gained == 0:
        return values
    shifted = values * np.where(gaining, 1 + total_variation / gained, 1 - total_variation / (1 - gained))
    return np.asarray(shifted / shifted.sum())


def chi_square_power(
    probabilities: ArrayLike,
    alternative_probabilities: ArrayLike,
    num_draws: int,
    alpha: float,
    min_expected: float = 5,
) -> float:
    """Chance that `chi_square_test` rejects `probabilities` at `alpha` when draws follow the alternative.

    The statistic is then about noncentral χ² with noncentrality n Σ (alternative − p)² / p over the pooled cells.
    Mass that the alternative puts where p is 0 gives it away at the first draw that lands there.

    Args:
        probabilities: [num_cells], the distribution under test.
        alternative_probabilities: [num_cells], the one that is really drawn from.
    """
    null, alternative = _distribution(probabilities), _distribution(alternative_probabilities)
    if null.shape != alternative.shape:
        raise ValueError(f"{null.shape} probabilities against {alternative.shape}")
    if num_draws < 1:
        raise ValueError(f"num_draws must be at least 1: {num_draws}")
    impossible = min(1.0, float(alternative[null == 0].sum()))
    never_there = (1 - impossible) ** num_draws
    if never_there == 0:
        return 1.0
    cells, num_cells = _pooled_cells(null * num_draws, min_expected)
    if num_cells == 1:
        return 1 - never_there
    expected, other = _merge(null, cells), _merge(alternative, cells) / (1 - impossible)
    noncentrality = num_draws * float(((other - expected) ** 2 / expected).sum())
    threshold = stats.chi2.isf(alpha, num_cells - 1)
    return 1 - never_there * float(stats.ncx2.cdf(threshold, num_cells - 1, noncentrality))


def _ratio(tops: Floats, bottoms: Floats, axis: int) -> Floats:
    return np.asarray(tops.sum(axis=axis) / bottoms.sum(axis=axis))


def _expanded_confidence(confidence: float, count: int) -> float:
    """The percentile interval's confidence level whose normal quantile is Student's, times √(n / (n − 1))."""
    quantile = stats.t.isf((1 - confidence) / 2, count - 1) * math.sqrt(count / (count - 1))
    return float(1 - 2 * stats.norm.sf(quantile))


def _normal_quantile(confidence: float) -> float:
    return float(stats.norm.isf((1 - confidence) / 2))


def _check_counts(successes: int, total: int) -> None:
    if not 0 <= successes <= total:
        raise ValueError(f"{successes} successes of {total}")


def _discordant(first_correct: Sequence[bool], second_correct: Sequence[bool]) -> tuple[int, int, int]:
    """How many questions only the first arm got right, how many only the second, and how many there are."""
    first, second = np.asarray(first_correct, dtype=bool), np.asarray(second_correct, dtype=bool)
    if first.ndim != 1 or first.shape != second.shape:
        raise ValueError(f"{first.shape} answers against {second.shape}")
    return int((first & ~second).sum()), int((second & ~first).sum()), first.size


def _distribution(probabilities: ArrayLike) -> Floats:
    values = np.asarray(probabilities, dtype=np.float64)
    if values.ndim != 1 or not (values >= 0).all() or not math.isclose(values.sum(), 1, abs_tol=1e-3):
        raise ValueError("probabilities must be one list of numbers that are not negative and sum to 1")
    return np.asarray(values / values.sum())


def _pooled_cells(expected: Floats, min_expected: float) -> tuple[NDArray[np.intp], int]:
    """Which pooled cell each cell belongs to, -1 for those expected never, and how many pooled cells there are."""
    cells = np.full(expected.shape, -1, dtype=np.intp)
    # From the rarest up; the pool is the front of this order, so that growing it always takes the smallest other cell.
    order = np.argsort(expected, kind="stable")
    order = order[expected[order] > 0]
    num_pooled = int((expected[order] < min_expected).sum())
    if 0 < num_pooled < order.size and expected[order[:num_pooled]].sum() < min_expected:
        num_pooled += 1
    cells[order[:num_pooled]] = 0
    first = min(num_pooled, 1)
    cells[order[num_pooled:]] = np.arange(first, first + order.size - num_pooled)
    return cells, first + order.size - num_pooled


def _merge(values: Floats, cells: NDArray[np.intp]) -> Floats:
    return np.asarray(np.bincount(cells[cells >= 0], weights=values[cells >= 0]), dtype=np.float64)
