"""Intervals and tests for single and paired proportions, such as the proportion of correct answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

from harness.results.statistics import Flags
from harness.results.statistics.interval import CONFIDENCE, Interval


def wald_interval(successes: int, total: int) -> Interval:
    """Wald's interval for a proportion, p̂ ± z √(p̂ (1 − p̂) / n), as published accuracy tables print it.

    The bounds are not clipped to [0, 1], so half of the interval's width is the published ±. The interval is too
    narrow: for a proportion of 0.95, it contains the true value in 34, 54, 78 and 88 % of the cases with 8, 15, 30 and
    100 trials.

    Args:
        total: at least 1.
    """
    proportion = successes / total
    standard_error = math.sqrt(proportion * (1 - proportion) / total)
    half_width = NormalDist().inv_cdf((1 + CONFIDENCE) / 2) * standard_error
    return Interval(proportion, proportion - half_width, proportion + half_width)


def wilson_interval(successes: int, total: int) -> Interval:
    """Wilson's score interval for a proportion (1927), without continuity correction; all nan without trials.

    Unlike Wald's interval, it stays inside [0, 1], and has a positive width even if no trial succeeds, or every trial
    does.
    """
    if total == 0:
        return Interval()
    from scipy.stats import binomtest

    bounds = binomtest(successes, total).proportion_ci(CONFIDENCE, method="wilson")
    return Interval(successes / total, float(bounds.low), float(bounds.high))


def difference_of_paired_proportions(
    first_correct: Sequence[bool], second_correct: Sequence[bool]
) -> Interval:
    """The second arm's proportion of correct answers minus the first arm's, with Newcombe's paired interval.

    The interval is method 10 of Newcombe, "Improved confidence intervals for the difference between binomial
    proportions based on paired data" (Statistics in Medicine 17, 1998). It combines Wilson's interval of each arm with
    the correlation of the arms' answers. It stays inside [-1, 1]. Unlike Wald's interval, it has a positive width even
    if the arms never disagree: five equal answers say little about the next ones.

    Args:
        first_correct: [num_questions], whether the first arm answered each question correctly.
        second_correct: [num_questions], whether the second arm did.

    Returns:
        The difference and its bounds in [-1, 1]; all nan without questions.
    """
    first_answers, second_answers = np.array([first_correct, second_correct], dtype=bool)
    total = first_answers.size
    correlation = _corrected_correlation(first_answers, second_answers)
    first = wilson_interval(int(first_answers.sum()), total)
    second = wilson_interval(int(second_answers.sum()), total)
    difference = second.estimate - first.estimate
    below = _distance(second.estimate - second.low, first.high - first.estimate, correlation)
    above = _distance(second.high - second.estimate, first.estimate - first.low, correlation)
    return Interval(difference, difference - below, difference + above)


def p_value_of_difference(difference: Interval) -> float:
    """Two-sided p-value of the hypothesis that there is no difference. It is below 5 % exactly if the interval excludes
    0.

    It assumes a normal distribution; the distance from the estimate to the bound nearer to 0 determines its standard
    deviation. nan without bounds.

    Args:
        difference: the difference with its 95 % interval.
    """
    normal = NormalDist()
    nearest = difference.low if difference.estimate > 0 else difference.high
    # Positive, because in a damaged file a bound may equal the estimate.
    distance = max(abs(difference.estimate - nearest), 1e-9)
    quantile = normal.inv_cdf((1 + CONFIDENCE) / 2)
    return 2 * normal.cdf(-quantile * abs(difference.estimate) / distance)


def _corrected_correlation(first: Flags, second: Flags) -> float:
    """φ of two arms, with Newcombe's continuity correction; 0 if one of the arms never varies.

    A positive numerator is reduced by n / 2, but not below 0; a negative one is kept.
    """
    # Python's integers, because the product of four such numbers may exceed 64 bits.
    total, num_first, num_second = first.size, int(first.sum()), int(second.sum())
    margins = num_first * (total - num_first) * num_second * (total - num_second)
    if not margins:
        return 0.0
    # This equals (both right × neither right) - (only the first right × only the second right).
    covariance = float(total * int((first & second).sum()) - num_first * num_second)
    if covariance > 0:
        covariance = max(covariance - total / 2, 0.0)
    return covariance / math.sqrt(margins)


def _distance(first: float, second: float, correlation: float) -> float:
    """The distance from a difference to one of its bounds, from the distances of its two terms to their bounds."""
    return math.sqrt(max(first**2 - 2 * correlation * first * second + second**2, 0.0))


def mcnemar_p_value(first_correct: Sequence[bool], second_correct: Sequence[bool]) -> float:
    """Return McNemar's exact two-sided p-value for two arms' answers to the same questions.

    Under the null hypothesis, a question that only one arm answers correctly is equally likely to be answered correctly
    by either arm. The p-value is 1 if there is no such question.

    Args:
        first_correct, second_correct: [num_questions], whether each arm answered each question correctly.
    """
    first, second = np.array([first_correct, second_correct], dtype=bool)
    discordant = int((first != second).sum())
    if discordant == 0:
        return 1.0
    from scipy.stats import binomtest

    return float(binomtest(int((first & ~second).sum()), discordant).pvalue)
