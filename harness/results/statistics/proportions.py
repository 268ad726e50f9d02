"""Intervals and tests of proportions, alone and paired, such as of correct answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

from harness.results.statistics import Flags
from harness.results.statistics.interval import CONFIDENCE, Interval


def wald_interval(successes: int, total: int) -> Interval:
    """Wald's interval of a proportion, p̂ ± z √(p̂ (1 − p̂) / n), as published accuracy tables print it.

    The bounds are not clipped to [0, 1], so that half their distance is the published ±. For a proportion of 0.95 their
    coverage with 8, 15, 30 and 100 trials is 34, 54, 78 and 88 %.
    """
    if total == 0:
        return Interval()
    proportion = successes / total
    standard_error = math.sqrt(proportion * (1 - proportion) / total)
    half_width = NormalDist().inv_cdf((1 + CONFIDENCE) / 2) * standard_error
    return Interval(proportion, proportion - half_width, proportion + half_width)


def wilson_interval(successes: int, total: int) -> Interval:
    """Wilson's score interval of a proportion (1927), without continuity correction.

    Unlike Wald's it stays inside [0, 1] and keeps a width when no trial or every trial succeeds.
    """
    if total == 0:
        return Interval()
    from scipy.stats import binomtest

    bounds = binomtest(successes, total).proportion_ci(CONFIDENCE, method="wilson")
    return Interval(successes / total, float(bounds.low), float(bounds.high))


def difference_of_paired_proportions(
    first_correct: Sequence[bool], second_correct: Sequence[bool]
) -> Interval:
    """Proportion correct of the second arm minus the first's, with Newcombe's paired interval.

    Method 10 of Newcombe, "Improved confidence intervals for the difference between binomial
    proportions based on paired data" (Statistics in Medicine 17, 1998): Wilson's interval of each
    arm, put together with the correlation of their answers. It stays inside [-1, 1] and, unlike
    Wald's, keeps a width where the arms never disagree: five answers alike say little about the
    next ones.

    Args:
        first_correct: [num_questions], whether the first arm answered correctly.
        second_correct: [num_questions], the same of the second arm.

    Returns:
        The difference and its bounds in [-1, 1]; all nan without questions.
    """
    first_answers, second_answers = np.array([first_correct, second_correct], dtype=bool)
    total = first_answers.size
    if not total:
        return Interval()
    correlation = _corrected_correlation(first_answers, second_answers)
    first = wilson_interval(int(first_answers.sum()), total)
    second = wilson_interval(int(second_answers.sum()), total)
    difference = second.estimate - first.estimate
    below = _distance(second.estimate - second.low, first.high - first.estimate, correlation)
    above = _distance(second.high - second.estimate, first.estimate - first.low, correlation)
    return Interval(difference, difference - below, difference + above)


def p_value_of_difference(difference: Interval) -> float:
    """Two-sided p-value of no difference: below 5 % exactly where the interval excludes 0.

    By the normal distribution, with the distance to the bound on the side of 0.

    Args:
        difference: with its 95 % interval.
    """
    normal = NormalDist()
    nearest = difference.low if difference.estimate > 0 else difference.high
    # Not 0: of a damaged file a bound may be the estimate.
    distance = max(abs(difference.estimate - nearest), 1e-9)
    quantile = normal.inv_cdf((1 + CONFIDENCE) / 2)
    return 2 * normal.cdf(-quantile * abs(difference.estimate) / distance)


def _corrected_correlation(first: Flags, second: Flags) -> float:
    """φ of two arms, with Newcombe's continuity correction; 0 if an arm never varies.

    The correction takes n / 2 off a positive numerator, down to 0.
    """
    # Python's integers, because products of four such numbers are beyond 64 bits.
    total, num_first, num_second = first.size, int(first.sum()), int(second.sum())
    margins = num_first * (total - num_first) * num_second * (total - num_second)
    if not margins:
        return 0.0
    # Both right times neither, less one alone times the other alone, by the counts at hand.
    covariance = float(total * int((first & second).sum()) - num_first * num_second)
    if covariance > 0:
        covariance = max(covariance - total / 2, 0.0)
    return covariance / math.sqrt(margins)


def _distance(first: float, second: float, correlation: float) -> float:
    """From a difference to one of its bounds, by the distances of the bounds of its two terms."""
    return math.sqrt(max(first**2 - 2 * correlation * first * second + second**2, 0.0))


def mcnemar_p_value(first_correct: Sequence[bool], second_correct: Sequence[bool]) -> float:
    """Return McNemar's exact two-sided p-value of two arms' answers to the same questions.

    Under the null, each question that only one arm gets right falls to either like a fair coin. 1
    when there are none.

    Args:
        first_correct, second_correct: [num_questions], whether each arm answered correctly.
    """
    first, second = np.array([first_correct, second_correct], dtype=bool)
    discordant = int((first != second).sum())
    if discordant == 0:
        return 1.0
    from scipy.stats import binomtest

    return float(binomtest(int((first & ~second).sum()), discordant).pvalue)
