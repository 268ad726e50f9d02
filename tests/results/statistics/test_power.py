"""The smallest visible difference."""

from __future__ import annotations

import math

import numpy as np
import pytest

from harness.results.statistics.runs import RatioEstimate, ratio_over_runs


def test_a_visible_difference_is_the_textbooks() -> None:
    # 30 pairs whose differences have a standard deviation of 1 in logs: the textbook's sample size
    # for a shift of 0.53 at 80 % power is 30 (Cohen, 1988: d = 0.53 needs n = 30).
    estimate = RatioEstimate(0.0, 30, 1 / 30)
    visible = estimate.visible_difference
    assert visible is not None
    assert math.log1p(visible) == pytest.approx(0.53, abs=0.01)
    assert estimate.chance_to_see(math.exp(0.53)) == pytest.approx(0.8, abs=0.01)
    assert estimate.chance_to_see(1.0) == pytest.approx(0.05)


@pytest.mark.parametrize("ratio", [1.05, 0.95])
def test_the_promised_power_is_what_simulation_finds(ratio: float) -> None:
    """One run of 20 prompts; over 2000 simulated measurements, a standard error of 1 %."""
    rng = np.random.default_rng(1)
    found = 0
    for _ in range(2000):
        times = ratio * np.exp(rng.normal(-(0.08**2) / 2, 0.08, (1, 20)))
        found += ratio_over_runs(times, np.ones((1, 20))).interval().excludes(1)
    known = RatioEstimate(0.0, 20, 0.08**2 / 20)
    assert found / 2000 == pytest.approx(known.chance_to_see(ratio), abs=0.04)


def test_without_an_interval_nothing_is_promised() -> None:
    few = RatioEstimate(0.0, 7, 0.01)
    assert few.visible_difference is None
    assert math.isnan(few.chance_to_see(1.1))
    exact = RatioEstimate(0.0, 15, 0.0)
    assert exact.visible_difference == 0
    assert exact.chance_to_see(1.001) == 1
