"""Two measurements compared: what an interval covers, and how often identical runs differ."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from harness.results.judging.change import Figure, judged_change
from harness.results.statistics.comparisons import (
    Comparison,
    Noise,
    compare,
    noise_of_runs,
)


def test_noise_is_that_of_identical_runs() -> None:
    rng = np.random.default_rng(0)
    noise = noise_of_runs(np.exp(rng.normal(0, 0.02 / math.sqrt(2), (501, 1))))
    assert noise.deviation == pytest.approx(0.02, rel=0.1)
    assert noise.degrees_of_freedom == 500
    assert Noise(0.02, 3).threshold() == pytest.approx(math.expm1(0.02 * stats.t.isf(0.025, 3)))
    # A further pair of identical runs, whose units do not differ.
    pair = compare(np.ones(15), np.ones(15), noise=noise)
    assert pair.change.high == pytest.approx(1 + noise.threshold())
    assert "15 prompts and the noise of 500 differences" in str(pair.change.covers)


def test_the_parts_of_the_variance_shrink_with_runs_and_units() -> None:
    """Four runs a side of eight units: between runs and within them the variances are known."""
    between, within = 0.03, 0.01
    of_run = np.array([[1], [1], [-1], [-1]])
    of_both = of_run * np.array([1, -1] * 4)
    runs = np.exp(between * of_run + within * of_both)
    estimate = compare(runs, runs).estimate
    # Sums of squares over their degrees of freedom; the mean of a side is over 4 runs and 8 units.
    assert estimate.unit_variance == 0
    assert estimate.run_variance == pytest.approx((4 * between**2 / 3) / 4 * 2)
    assert estimate.run_degrees_of_freedom == 6
    changes = 0.1 * np.array([1, -1] * 4)
    moved = compare(runs, runs * np.exp(changes)).estimate
    residual = (32 * within**2 / 21) * (1 / 4 + 1 / 4)
    assert moved.unit_variance == pytest.approx((changes.var(ddof=1) - residual) / 8)
    # Half of the variance between two identical runs is that of one, with four degrees of freedom more.
    noisy = compare(runs, runs, Noise(0.05, 4)).estimate
    of_means = (6 * (4 * between**2 / 3) + 4 * 0.05**2 / 2) / (6 + 4)
    assert noisy.run_variance == pytest.approx(of_means / 4 * 2)
    assert noisy.run_degrees_of_freedom == 10
    assert "4 + 4 runs and the noise of 4 differences between identical runs" in str(noisy.covers)
    few = compare(runs[:2], runs[:1])
    assert str(few.change.covers) == "8 prompts and 2 + 1 runs"


Floats = NDArray[np.float64]


NUMBER = 1000
TIME = Figure("ms per token", "lower", ("faster", "slower"), timed=True)


def measured(
    rng: np.random.Generator, num_runs: int, slowdown: float, run: float = 0.013
) -> Floats:
    """Noise of runs and of prompts within a run, [num_runs, 15] around `slowdown`."""
    between_runs, within = rng.normal(0, run, (num_runs, 1)), rng.normal(0, 0.02, (num_runs, 15))
    return np.asarray((1 + slowdown) * np.exp(between_runs + within))


def simulate(
    num_runs: int, slowdown: float = 0.0, noise: Noise | None = None, run: float = 0.013
) -> list[Comparison]:
    """Comparisons of ms per token at a margin of 2 %; prompts differ a lot."""
    rng = np.random.default_rng(1)
    found = []
    for _ in range(NUMBER):
        hardness = rng.lognormal(0, 0.5, 15)
        before = hardness * measured(rng, num_runs, 0.0, run)
        after = hardness * measured(rng, num_runs, slowdown, run)
        found.append(compare(before, after, noise=noise))
    return found


def share(comparisons: list[Comparison], relation: str) -> float:
    statements = [judged_change(TIME, comparison, 0.02) for comparison in comparisons]
    return sum(statement.relation == relation for statement in statements) / len(statements)


def test_identical_runs_seldom_differ() -> None:
    """Nominally 2.5 % each; over 1000 simulated pairs of measurements with 5 runs a side."""
    found = simulate(num_runs=5)
    assert share(found, "worse") <= 0.035
    assert share(found, "better") <= 0.04
    assert np.mean([comparison.p_value < 0.05 for comparison in found]) <= 0.065
    assert str(found[0].change.covers) == "15 prompts and 5 + 5 runs"
