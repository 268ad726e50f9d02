"""A line through ratios of totals: found exactly without noise, covered by its intervals with it."""

from __future__ import annotations

import numpy as np
import pytest

from harness.results.statistics.lines import line_of_ratios

PLACES = (2.0, 4.0, 8.0)


def planted(noise: float, num_units: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Times of iterations that take 20 + 3 x, of units of different lengths that are slower at all places alike."""
    rng = np.random.default_rng(seed)
    iterations = rng.integers(5, 30, size=(len(PLACES), num_units)).astype(float)
    of_unit = rng.standard_normal(num_units)
    of_both = noise * (of_unit + rng.standard_normal((len(PLACES), num_units)))
    times = iterations * (20 + 3 * np.array(PLACES))[:, None] * (1 + of_both)
    return times, iterations


def test_a_line_without_noise_is_found() -> None:
    line = line_of_ratios(PLACES, *planted(0.0, 9, seed=0), "prompt")
    for found, expected in zip(line, (20, 3), strict=True):
        assert found.low == pytest.approx(expected)
        assert found.estimate == pytest.approx(expected)
        assert found.high == pytest.approx(expected)
    assert str(line.slope.covers) == "9 prompts"


def test_few_units_give_no_bounds() -> None:
    line = line_of_ratios(PLACES, *planted(0.0, 7, seed=0), "prompt")
    assert not line.slope.has_bounds
    assert line.slope.covers is None
    assert line.intercept.estimate == pytest.approx(20)


def test_intervals_cover_the_truth_as_often_as_they_say() -> None:
    """In 100 samples at 95 %: fewer than 86 has a chance of 1e-4, and a half-width too small by a third gives 81."""
    covered = [0, 0]
    for seed in range(100):
        line = line_of_ratios(PLACES, *planted(0.1, 15, seed), "prompt")
        covered[0] += line.intercept.low <= 20 <= line.intercept.high
        covered[1] += line.slope.low <= 3 <= line.slope.high
    assert min(covered) >= 86, covered
