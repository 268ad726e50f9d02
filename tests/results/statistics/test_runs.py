"""Ratios over runs and units: the parts of their variance, and the smallest visible difference."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from harness.results.statistics.ratios import ratio_of_totals
from harness.results.statistics.runs import ratio_over_runs


def test_one_run_is_students_interval_of_its_prompts() -> None:
    rng = np.random.default_rng(0)
    tops = 1.02 * np.exp(rng.normal(0, 0.05, 15))
    estimate = ratio_over_runs([tops], [np.ones(15)])
    assert str(estimate.covers) == "15 prompts"
    assert estimate.degrees_of_freedom == pytest.approx(14)
    assert estimate.standard_error == pytest.approx(stats.sem(tops / tops.mean()), rel=0.03)


def test_runs_that_vary_alone_have_the_degrees_of_freedom_of_runs() -> None:
    tops = np.outer([1.9, 2.0, 2.1, 2.05, 1.95], np.ones(15))
    estimate = ratio_over_runs(tops, np.ones((5, 15)), unit="lap")
    assert str(estimate.covers) == "15 laps and 5 runs"
    assert estimate.degrees_of_freedom == pytest.approx(4)
    interval = estimate.interval()
    assert interval.estimate == pytest.approx(2)
    assert math.log(interval.high / 2) == pytest.approx(
        stats.t.isf(0.025, 4) * stats.sem([1.9, 2.0, 2.1, 2.05, 1.95]) / 2
    )


def test_few_units_have_no_interval() -> None:
    interval = ratio_over_runs(np.full((5, 7), 3.0), np.full((5, 7), 2.0)).interval()
    assert interval.estimate == pytest.approx(1.5)
    assert math.isnan(interval.low)
    assert math.isnan(interval.high)
    assert not interval.excludes(1)
    blocks = ratio_over_runs(np.full((2, 4), 3.0), np.full((2, 4), 2.0), "block")
    assert blocks.interval().has_bounds


def test_variances_are_split_by_runs_and_units() -> None:
    """Three runs of four units, and what neither explains, with 2 × 3 degrees of freedom; the mean is 100."""
    runs, units = np.array([[-2.0], [-1.0], [3.0]]), np.array([[-1.5, -0.5, -1.0, 3.0]])
    tops = 100 + runs + units + 2 * np.outer([1, -1, 0], [1, -1, 0, 0])
    of_runs, of_units = 4 * runs.var(ddof=1), 3 * units.var(ddof=1)
    residual = 4 * 2**2 / 6
    estimate = ratio_over_runs(tops, np.ones((3, 4)), "block")
    variances = estimate.unit_variance, estimate.run_variance
    parts = of_units - residual, of_runs
    assert variances == pytest.approx([part / 12 / 100**2 for part in parts], rel=0.01)
    between = of_runs**2 / 2 + (of_units - residual) ** 2 / 3
    assert estimate.degrees_of_freedom == pytest.approx(
        (of_runs + of_units - residual) ** 2 / between, rel=0.01
    )
    # By chance the residual may be above either.
    quiet = ratio_over_runs(100 + tops - runs - units, np.ones((3, 4)), "block")
    assert (quiet.unit_variance, quiet.run_variance) == (0, pytest.approx(0))


Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Simulated:
    """Standard deviations of the log of the speed-up, which is 2 in the long run.

    Prompts are also hard or easy, in both arms alike. A heavy tail of runs is Student's t on 3
    degrees of freedom.
    """

    run: float
    unit: float
    residual: float
    num_runs: int = 5
    num_units: int = 15
    heavy_runs: bool = False
    hardness: float = 0.5

    def draw(self, number: int, seed: int) -> tuple[Floats, Floats]:
        """ms of the regular and of the speculative arm, [number, num_runs, num_units]."""
        rng = np.random.default_rng(seed)
        run_shape, unit_shape = (number, self.num_runs, 1), (number, 1, self.num_units)
        run = (
            rng.standard_t(3, run_shape) / np.sqrt(3)
            if self.heavy_runs
            else rng.normal(size=run_shape)
        )
        unit = rng.normal(size=unit_shape)
        noise = self.residual * rng.normal(size=(number, self.num_runs, self.num_units))
        hardness = rng.lognormal(0, self.hardness, unit_shape)
        # The means of both arms are those of the hardness, times 2 for the regular arm.
        speculative = hardness * np.exp(self.unit * unit + noise) / self._mean_of_exp()
        regular = 2 * hardness * np.exp(self.run * run)
        return np.broadcast_to(regular, speculative.shape), speculative

    def _mean_of_exp(self) -> float:
        return float(np.exp(self.unit**2 / 2 + self.residual**2 / 2))


NUMBER = 1000


# A quiet machine whose prompts differ, runs that vary as seen, and runs that vary most.
KINDS = [
    Simulated(run=0.0, unit=0.1, residual=0.02),
    Simulated(run=0.013, unit=0.03, residual=0.01),
    Simulated(run=0.05, unit=0.05, residual=0.05),
    Simulated(run=0.05, unit=0.0, residual=0.01, heavy_runs=True),
    Simulated(run=0.05, unit=0.05, residual=0.02, num_runs=3),
]


def pairs(kind: Simulated, number: int, seed: int = 1) -> Iterator[tuple[Floats, Floats]]:
    """Times of both arms, one simulated measurement after another."""
    return zip(*kind.draw(number, seed), strict=True)


def coverage(kind: Simulated, seed: int = 1) -> float:
    """Share of simulated measurements whose interval holds the long-run ratio."""
    found = [
        ratio_over_runs(tops, bottoms).interval() for tops, bottoms in pairs(kind, NUMBER, seed)
    ]
    return float(np.mean([interval.low <= 2 <= interval.high for interval in found]))


@pytest.mark.parametrize("kind", KINDS)
def test_the_interval_covers_the_long_run_ratio(kind: Simulated) -> None:
    """Over 1000 simulated measurements, whose covered share has a standard error of 0.8 %."""
    assert 0.92 <= coverage(kind) <= 0.985


@pytest.mark.parametrize("num_runs", [2, 5])
def test_four_blocks_in_each_run_cover_the_ratio(num_runs: int) -> None:
    """1000 measurements again. As independent blocks, they would be taken for four times as many."""
    kind = Simulated(run=0.02, unit=0.02, residual=0.02, num_runs=num_runs, num_units=4)
    crossed = independent = 0
    for tops, bottoms in pairs(kind, NUMBER):
        interval = ratio_over_runs(tops, bottoms, "block").interval()
        crossed += interval.low <= 2 <= interval.high
        interval = ratio_of_totals([tops.ravel()], [bottoms.ravel()], "block")
        independent += interval.low <= 2 <= interval.high
    assert 0.92 <= crossed / NUMBER <= 0.985
    assert independent / NUMBER < 0.9
