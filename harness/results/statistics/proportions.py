"""Intervals and tests of proportions, alone and paired: of the correct answers of `eval`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from harness.results.statistics.distributions import binomial_cdf, normal_quantile
from harness.results.statistics.interval import CONFIDENCE, Interval


def wald_interval(successes: int, total: int) -> Interval:
    """Wald's interval of a proportion, p̂ ± z √(p̂ (1 − p̂) / n), as published accuracy tables print it.

    The bounds are not clipped to [0, 1], so that half their distance is the published ±.
    """
    if total == 0:
        return Interval()
    proportion = successes / total
    standard_error = math.sqrt(proportion * (1 - proportion) / total)
    if standard_error == 0:
        return Interval(proportion, proportion, proportion)
    half_width = normal_quantile((1 - CONFIDENCE) / 2) * standard_error
    return Interval(proportion, proportion - half_width, proportion + half_width)


def wilson_interval(successes: int, total: int, confidence: float = CONFIDENCE) -> Interval:
    """Wilson's score interval of a proportion (1927), without continuity correction.

    Unlike Wald's it stays inside [0, 1] and keeps a width when no trial or every trial succeeds.
    """
    if total == 0:
        return Interval()
    proportion = successes / total
    z = normal_quantile((1 - confidence) / 2)
    shrinkage = 1 + z**2 / total
    centre = (proportion + z**2 / (2 * total)) / shrinkage
    variance = proportion * (1 - proportion) / total + z**2 / (4 * total**2)
    half_width = z * math.sqrt(variance) / shrinkage
    # Without rounding where no trial or every trial succeeded.
    low = 0.0 if successes == 0 else centre - half_width
    high = 1.0 if successes == total else centre + half_width
    return Interval(proportion, low, high)


def difference_of_paired_proportions(
    first_correct: Sequence[bool], second_correct: Sequence[bool], confidence: float = CONFIDENCE
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

    Raises:
        ValueError: when the two differ in length.
    """
    first = np.asarray(first_correct, dtype=bool)
    second = np.asarray(second_correct, dtype=bool)
    if first.ndim != 1 or first.shape != second.shape:
        raise ValueError(f"{first.shape} answers against {second.shape}")
    if first.size == 0:
        return Interval()
    correlation = _corrected_correlation(first, second)
    of_first = wilson_interval(int(first.sum()), first.size, confidence)
    of_second = wilson_interval(int(second.sum()), second.size, confidence)
    difference = of_second.estimate - of_first.estimate
    below = _distance(
        of_second.estimate - of_second.low, of_first.high - of_first.estimate, correlation
    )
    above = _distance(
        of_second.high - of_second.estimate, of_first.estimate - of_first.low, correlation
    )
    return Interval(difference, difference - below, difference + above)


def _corrected_correlation(first: NDArray[np.bool_], second: NDArray[np.bool_]) -> float:
    """φ of two arms, its numerator nearer to 0 by n / 2 where positive; 0 if an arm never varies."""
    both = int((first & second).sum())
    neither = int((~first & ~second).sum())
    only_first = int((first & ~second).sum())
    only_second = int((second & ~first).sum())
    margins = first.sum() * (~first).sum() * second.sum() * (~second).sum()
    if not margins:
        return 0.0
    covariance = float(both * neither - only_first * only_second)
    if covariance > 0:
        covariance = max(covariance - first.size / 2, 0.0)
    return covariance / math.sqrt(margins)


def _distance(one: float, other: float, correlation: float) -> float:
    """Half of an interval of a difference, from those of its two terms."""
    return math.sqrt(max(one**2 - 2 * correlation * one * other + other**2, 0.0))


def mcnemar_p_value(first_correct: Sequence[bool], second_correct: Sequence[bool]) -> float:
    """Return McNemar's exact two-sided p-value of two arms' answers to the same questions.

    Under the null, each question that only one arm gets right falls to either like a fair coin. 1
    when there are none.

    Args:
        first_correct, second_correct: [num_questions], whether each arm answered correctly.
    """
    first = np.asarray(first_correct, dtype=bool)
    second = np.asarray(second_correct, dtype=bool)
    only_first = int((first & ~second).sum())
    only_second = int((second & ~first).sum())
    discordant = only_first + only_second
    if discordant == 0:
        return 1.0
    # A fair coin is symmetric: both tails are equal, and overlap where neither arm is ahead.
    return min(2 * binomial_cdf(min(only_first, only_second), discordant, 0.5), 1.0)
