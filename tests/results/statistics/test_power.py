"""The smallest visible difference."""

from __future__ import annotations

import math

import pytest

from harness.results.statistics.runs import RatioEstimate


def test_a_visible_difference_is_the_textbooks() -> None:
    # 30 pairs whose differences have a standard deviation of 1 in logs: the textbook's sample size
    # for a shift of 0.53 at 80 % power is 30 (Cohen, 1988: d = 0.53 needs n = 30).
    estimate = RatioEstimate(0.0, 30, 1 / 30)
    visible = estimate.visible_difference
    assert visible is not None
    assert math.log1p(visible) == pytest.approx(0.53, abs=0.01)
    assert estimate.chance_to_see(math.exp(0.53)) == pytest.approx(0.8, abs=0.01)
    assert estimate.chance_to_see(1.0) == pytest.approx(0.05)


def test_without_an_interval_nothing_is_promised() -> None:
    few = RatioEstimate(0.0, 7, 0.01)
    assert few.visible_difference is None
    assert math.isnan(few.chance_to_see(1.1))
    exact = RatioEstimate(0.0, 15, 0.0)
    assert exact.visible_difference == 0
    assert [exact.chance_to_see(1.0), exact.chance_to_see(1.001)] == [0, 1]
