"""Proportions against published values, and several alternatives at once: error rates of the whole table."""

import math

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from harness.results.statistics.interval import Coverage, Interval
from harness.results.statistics.multiplicity import adjusted_p_values, relative_speedup, widened
from harness.results.statistics.proportions import (
    difference_of_paired_proportions,
    mcnemar_p_value,
    wald_interval,
    wilson_interval,
)


# Newcombe 1998, "Two-sided confidence intervals for the single proportion", table I, methods 1 and 3.
def test_intervals_of_a_proportion_equal_newcombes() -> None:
    for successes, total, wald, wilson in [
        (81, 263, (0.2522, 0.3638), (0.2553, 0.3662)),
        (0, 20, (0.0, 0.0), (0.0, 0.1611)),
        (1, 29, (-0.0319, 0.1009), (0.0061, 0.1718)),
    ]:
        for interval, (low, high) in (
            (wald_interval(successes, total), wald),
            (wilson_interval(successes, total), wilson),
        ):
            assert interval.low == pytest.approx(low, abs=5e-5)
            assert interval.high == pytest.approx(high, abs=5e-5)


def test_a_proportion_of_nothing_is_not_a_number() -> None:
    for interval in (wilson_interval(0, 0), difference_of_paired_proportions([], [])):
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
def test_paired_difference_equals_newcombes() -> None:
    for cells, published in [
        ((36, 12, 2, 0), (0.0569, 0.3404)),
        ((2, 97, 1, 0), (0.8721, 0.9854)),
        ((0, 30, 0, 0), (0.8395, 1.0)),
        ((54, 0, 0, 0), (-0.0664, 0.0664)),
        ((59, 6, 16, 80), (-0.1186, -0.0046)),
    ]:
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
    half_width = 1.959964 * math.sqrt(1 / 3 / 120_000)
    assert (interval.high - interval.low) / 2 == pytest.approx(half_width, rel=1e-3)


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


Floats = NDArray[np.float64]


def alternatives(
    rng: np.random.Generator, log_speedups: Floats, num_units: int = 15, spread: float = 0.1
) -> tuple[Floats, Floats]:
    """Times of both arms of alternatives in a run on the same prompts, with these long-run log speed-ups."""
    shape = len(log_speedups), 1, num_units
    hardness = rng.lognormal(0, 0.5, num_units)
    own = rng.normal(0, spread, shape) + spread**2 / 2
    speculative = hardness * np.exp(-log_speedups[:, None, None] - own)
    return np.broadcast_to(hardness, shape), speculative


def relative_to_best(tops: Floats, bottoms: Floats, unseen: float = 0.0) -> list[Interval]:
    """As a series chooses its reference where all are shown to pay."""
    best = int(np.argmax(np.sum(tops, axis=(1, 2)) / np.sum(bottoms, axis=(1, 2))))
    arms = list(zip(tops, bottoms, strict=True))
    return [
        relative_speedup(both, arms[best], len(arms), (unseen * number, unseen * (best + 1)))
        for number, both in enumerate(arms, 1)
    ]


def test_intervals_of_a_table_hold_together() -> None:
    """Six equal alternatives, over 400 tables: a false difference anywhere in about 5 %.

    It is 6.5 % with 15 prompts as unlike in length as these. Intervals of each pair by itself raise
    a false alarm in far more tables.
    """
    rng = np.random.default_rng(0)
    wrong, wrong_apart = 0, 0
    for _ in range(400):
        tops, bottoms = alternatives(rng, np.zeros(6))
        wrong += any(share.high < 1 for share in relative_to_best(tops, bottoms))
        [bottoms] = bottoms.swapaxes(0, 1)
        added = -bottoms / bottoms.mean(axis=1, keepdims=True)
        logs = np.log(bottoms.sum(axis=1))
        best = logs.argmin()
        wrong_apart += any(
            logs[other] - logs[best] > 2.145 * stats.sem(added[other] - added[best])
            for other in range(6)
        )
    assert wrong / 400 <= 0.09
    assert wrong_apart / 400 > 0.2


def test_equal_alternatives_are_known_exactly_and_few_units_have_no_interval() -> None:
    same = relative_to_best(np.full((2, 1, 15), 2.0), np.ones((2, 1, 15)))
    assert [share.estimate for share in same] == pytest.approx([1, 1])
    assert all(share.low == share.estimate == share.high for share in same)
    rng = np.random.default_rng(0)
    few = relative_to_best(*alternatives(rng, np.array([0.0, -1.0]), num_units=7))
    assert few[1].estimate < 1
    assert math.isnan(few[1].high)
    other, best = relative_to_best(*alternatives(rng, np.array([-1.0, 0.0])))
    assert (best.low, best.estimate, best.high) == (1, 1, 1)
    assert other.high < 1
    # With 1.1 times as many iterations in the long run the other gains less, with 1.21 times as many the best one does.
    tops, bottoms = alternatives(np.random.default_rng(0), np.array([-1.0, 0.0]))
    wider, known = (relative_to_best(tops, bottoms, unseen)[0] for unseen in (math.log(1.1), 0.0))
    assert (wider.low, wider.high) == pytest.approx((known.low / 1.1, known.high * 1.21))


def test_adjusted_p_values_are_benjamini_and_hochbergs() -> None:
    # The 15 p-values of their paper's example (1995), of which four are rejected at 5 %.
    published = [
        0.0001, 0.0004, 0.0019, 0.0095, 0.0201, 0.0278, 0.0298, 0.0344, 0.0459, 0.3240, 0.4262,
        0.5719, 0.6528, 0.7590, 1.0,
    ]  # fmt: skip
    adjusted = adjusted_p_values(published)
    assert sum(value <= 0.05 for value in adjusted) == 4
    assert adjusted[3] == pytest.approx(0.0095 * 15 / 4)
    with_gap = adjusted_p_values([math.nan, *published])
    assert math.isnan(with_gap[0])
    assert with_gap[1:] == adjusted
    assert adjusted_p_values([]) == []


FEW_RUNS = Coverage(15, "prompt", num_runs=2, degrees_of_freedom=2.5)


@pytest.mark.parametrize(
    ("confidence", "share", "covers", "freedom"),
    [
        (0.95, 1.0, Coverage(15, "prompt"), 14),
        (0.97, 0.6, Coverage(15, "prompt"), 14),
        (0.95, 1.0, FEW_RUNS, 2.5),
    ],
)
def test_an_interval_is_widened_so_that_six_miss_together_as_one(
    confidence: float, share: float, covers: Coverage, freedom: float
) -> None:
    """One of 97 %, which covers 95 % because it was looked at, may miss 0.6 times as often."""
    error = 0.1
    level = 1 - (1 - 0.95 ** (1 / 6)) * share
    quantiles = [stats.t.ppf((1 + each) / 2, freedom) for each in (confidence, level)]
    bounds = (2 * math.exp(-quantiles[0] * error), 2 * math.exp(quantiles[0] * error))
    alone = Interval(2.0, *bounds, covers)
    wide = widened(alone, 6, confidence)
    assert math.log(wide.high / 2) == pytest.approx(quantiles[1] * error)
    assert math.log(wide.low / 2) == pytest.approx(-quantiles[1] * error)
