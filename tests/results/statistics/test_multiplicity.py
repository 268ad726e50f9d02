"""Several alternatives at once: error rates of the whole table, and the flattered best."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from harness.results.statistics.interval import Coverage, Interval
from harness.results.statistics.multiplicity import (
    adjusted_p_values,
    relative_to,
    widened,
)

Floats = NDArray[np.float64]


def alternatives(
    rng: np.random.Generator, log_speedups: Floats, num_units: int = 15, spread: float = 0.1
) -> tuple[Floats, Floats]:
    """Times of both arms of alternatives on the same prompts, with these long-run log speed-ups."""
    shape = len(log_speedups), num_units
    hardness = rng.lognormal(0, 0.5, num_units)
    own = rng.normal(0, spread, shape) + spread**2 / 2
    speculative = hardness * np.exp(-log_speedups[:, None] - own)
    return np.broadcast_to(hardness, shape), speculative


def relative_to_best(tops: Floats, bottoms: Floats) -> list[Interval]:
    """As a series chooses its reference where all are shown to pay."""
    best = int(np.argmax(np.sum(tops, axis=1) / np.sum(bottoms, axis=1)))
    return relative_to(best, tops, bottoms)


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
    same = relative_to_best(np.full((2, 15), 2.0), np.ones((2, 15)))
    assert [share.estimate for share in same] == pytest.approx([1, 1])
    assert all(share.low == share.estimate == share.high for share in same)
    rng = np.random.default_rng(0)
    few = relative_to_best(*alternatives(rng, np.array([0.0, -1.0]), num_units=7))
    assert few[1].estimate < 1
    assert math.isnan(few[1].high)
    other, best = relative_to_best(*alternatives(rng, np.array([-1.0, 0.0])))
    assert (best.low, best.estimate, best.high) == (1, 1, 1)
    assert other.high < 1


def test_a_pair_alone_has_the_interval_of_students_t() -> None:
    """With many units of one length, where every error is the same."""
    rng = np.random.default_rng(0)
    ratios = np.exp(rng.normal(0, 0.1, 400))
    shares = relative_to_best([np.ones(400), ratios], np.ones((2, 400)))
    found = min(shares, key=lambda share: share.estimate)
    half_width = stats.t.ppf(0.975, 399) * stats.sem(ratios / ratios.mean())
    assert math.log(found.high / found.estimate) == pytest.approx(half_width, rel=0.05)
    assert math.log(found.estimate / found.low) == pytest.approx(half_width, rel=0.05)


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


@pytest.mark.parametrize(("confidence", "share"), [(0.95, 1.0), (0.97, 0.6)])
def test_an_interval_is_widened_so_that_six_miss_together_as_one(
    confidence: float, share: float
) -> None:
    """One of 97 %, which covers 95 % because it was looked at, may miss 0.6 times as often."""
    error, freedom = 0.1, 14
    level = 1 - (1 - 0.95 ** (1 / 6)) * share
    quantiles = [stats.t.ppf((1 + each) / 2, freedom) for each in (confidence, level)]
    bounds = (2 * math.exp(-quantiles[0] * error), 2 * math.exp(quantiles[0] * error))
    alone = Interval(2.0, *bounds, Coverage(freedom + 1, "prompt"))
    wide = widened(alone, 6, confidence)
    assert math.log(wide.high / 2) == pytest.approx(quantiles[1] * error)
    assert math.log(wide.low / 2) == pytest.approx(-quantiles[1] * error)
