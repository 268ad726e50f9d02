"""Proportions against published values."""

from __future__ import annotations

import math

import numpy as np
import pytest

from harness.results.statistics.proportions import (
    difference_of_paired_proportions,
    mcnemar_p_value,
    wald_interval,
    wilson_interval,
)


# Newcombe 1998, "Two-sided confidence intervals for the single proportion", table I, methods 1 and 3.
@pytest.mark.parametrize(
    ("successes", "total", "wald", "wilson"),
    [
        (81, 263, (0.2522, 0.3638), (0.2553, 0.3662)),
        (0, 20, (0.0, 0.0), (0.0, 0.1611)),
        (1, 29, (-0.0319, 0.1009), (0.0061, 0.1718)),
    ],
)
def test_intervals_of_a_proportion_equal_newcombes(
    successes: int, total: int, wald: tuple[float, float], wilson: tuple[float, float]
) -> None:
    for interval, (low, high) in (
        (wald_interval(successes, total), wald),
        (wilson_interval(successes, total), wilson),
    ):
        assert interval.low == pytest.approx(low, abs=5e-5)
        assert interval.high == pytest.approx(high, abs=5e-5)


def test_a_proportion_of_nothing_is_not_a_number() -> None:
    for interval in (
        wald_interval(0, 0),
        wilson_interval(0, 0),
        difference_of_paired_proportions([], []),
    ):
        assert math.isnan(interval.estimate)
        assert math.isnan(interval.low)
        assert math.isnan(interval.high)


def paired_answers(
    both: int, only_first: int, only_second: int, neither: int
) -> tuple[list[bool], list[bool]]:
    first = [True] * (both + only_first) + [False] * (only_second + neither)
    second = [True] * both + [False] * only_first + [True] * only_second + [False] * neither
    return first, second


# Newcombe 1998, "Improved confidence intervals for the difference between binomial proportions
# based on paired data", table III, method 10: both, only the first, only the second, neither.
# The last is Fagerland, Lydersen and Laake's, of Cavo et al. 2012, as their package prints it.
@pytest.mark.parametrize(
    ("cells", "published"),
    [
        ((36, 12, 2, 0), (0.0569, 0.3404)),
        ((2, 97, 1, 0), (0.8721, 0.9854)),
        ((0, 30, 0, 0), (0.8395, 1.0)),
        ((54, 0, 0, 0), (-0.0664, 0.0664)),
        ((59, 6, 16, 80), (-0.1186, -0.0046)),
    ],
)
def test_paired_difference_equals_newcombes(
    cells: tuple[int, int, int, int], published: tuple[float, float]
) -> None:
    first, second = paired_answers(*cells)
    interval = difference_of_paired_proportions(second, first)
    assert (interval.low, interval.high) == pytest.approx(published, abs=5e-5)
    turned = difference_of_paired_proportions(first, second)
    assert (-turned.high, -turned.low) == pytest.approx(published, abs=5e-5)


def test_paired_difference_does_not_depend_on_how_large_counts_are() -> None:
    """The product of the margins of 120,000 questions is beyond 64 bits."""
    paired = paired_answers(40_000, 20_000, 20_000, 40_000)
    interval = difference_of_paired_proportions(*paired)
    # Wald's standard error: the root of the discordant share, 1/3, over the number of questions.
    assert (interval.high - interval.low) / 2 == pytest.approx(
        1.959964 * math.sqrt(1 / 3 / 120_000), rel=1e-3
    )


def test_mcnemar_equals_the_published_exact_value() -> None:
    # Airway responsiveness of 21 children before and after transplantation, Bentur et al. 2009: 1 against 7
    # discordant pairs. Fagerland, Lydersen and Laake 2013 give the exact conditional p-value as 0.070.
    before, after = paired_answers(9, 1, 7, 4)
    assert mcnemar_p_value(before, after) == pytest.approx(0.0703125)
    assert mcnemar_p_value(after, before) == mcnemar_p_value(before, after)


def test_mcnemar_without_disagreement_sees_none() -> None:
    assert mcnemar_p_value([], []) == 1.0
    assert mcnemar_p_value(*paired_answers(5, 0, 0, 4)) == 1.0
    assert mcnemar_p_value(*paired_answers(0, 3, 3, 0)) == 1.0


def test_paired_difference_covers_the_truth() -> None:
    """Over 2000 simulated runs. Wald's interval covers 69 % where the arms rarely differ."""
    # Both, only the first, only the second, neither.
    chances, num_questions = (0.9, 0.0, 0.03, 0.07), 40
    rng = np.random.default_rng(2)
    true_difference = chances[2] - chances[1]
    covered, covered_by_wald = 0, 0
    for _ in range(2000):
        cells = rng.multinomial(num_questions, chances)
        interval = difference_of_paired_proportions(*paired_answers(*cells))
        covered += interval.low <= true_difference <= interval.high
        difference = (cells[2] - cells[1]) / num_questions
        variance = (cells[1] + cells[2]) / num_questions - difference**2
        error = math.sqrt(variance / num_questions)
        covered_by_wald += abs(difference - true_difference) <= 1.96 * error
    assert covered / 2000 > 0.935
    assert covered_by_wald / 2000 < 0.85
