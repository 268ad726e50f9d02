"""Two measurements of the same units compared: the change with its intervals.

`results.judging.change` says what follows. Units are prompts, batches or laps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from harness.results.statistics.arrays import Floats
from harness.results.statistics.interval import (
    CONFIDENCE,
    NAN,
    Coverage,
    Interval,
    fewest_units,
    t_quantile,
)
from harness.results.statistics.proportions import (
    difference_of_paired_proportions,
    p_value_of_difference,
)
from harness.results.statistics.ratios import RatioEstimate
from harness.results.statistics.runs import MeanSquares

Direction = Literal["lower", "higher"]

# Two one-sided tests at the level of 5 % are read from the two-sided interval of 90 %.
_ONE_SIDED_LEVEL = 0.05


@dataclass(frozen=True)
class Noise:
    """How far apart identical runs are.

    Args:
        deviation: standard deviation of the log of the ratio of two identical runs.
        degrees_of_freedom: number of independent pairs of runs that it was measured on, or of
            runs less one: five identical runs give 4.
    """

    deviation: float
    degrees_of_freedom: int

    def threshold(self) -> float:
        """The change, as a share, that a further pair of identical runs stays within, at 95 %."""
        quantile = t_quantile((1 - CONFIDENCE) / 2, self.degrees_of_freedom)
        return math.expm1(quantile * self.deviation)


@dataclass(frozen=True)
class Comparison:
    """After against before.

    Args:
        change: after over before, or for proportions after minus before, with its interval.
        one_sided: the same with the interval of 90 %, for one-sided tests at 5 %.
        p_value: two-sided, of no change: below 5 % exactly where `change` excludes it.
        estimate: of a ratio, for power; None for proportions.
    """

    change: Interval
    one_sided: Interval
    p_value: float
    estimate: RatioEstimate | None = None


# Of what cannot be compared.
NOT_COMPARED = Comparison(Interval(), Interval(), NAN)


def noise_of_runs(values: ArrayLike) -> Noise:
    """Noise from several runs of the same program.

    Args:
        values: [num_runs, num_units], positive; two runs at least.
    """
    means = _logs(values).mean(axis=1)
    # The ratio of two runs has twice the variance of one.
    return Noise(math.sqrt(2 * means.var(ddof=1)), means.size - 1)


def compare(
    before: ArrayLike, after: ArrayLike, noise: Noise | None = None, unit: str = "prompt"
) -> Comparison:
    """Compare two measurements of the same units by their log-ratios.

    The same prompt before and after is one pair; run 1 before and run 1 after are not. The
    deviation between runs is pooled over both sides and `noise`, if there is any. Where there is
    neither a second run nor `noise`, the interval covers the units alone, and two runs of the same
    program differ significantly more often than the level says.

    Args:
        before: [num_units] or [num_runs, num_units], positive: ms per token, speed-up, acceptance
            length, one figure per prompt or lap.
        after: the same units in the same order; its number of runs may differ.
        noise: from identical runs, measured elsewhere (A/A).
        unit: what a unit is called, such as "prompt" or "lap".
    """
    estimate = change_between(before, after, noise, unit)
    one_sided = estimate.interval(1 - 2 * _ONE_SIDED_LEVEL)
    return Comparison(estimate.interval(), one_sided, estimate.p_value(), estimate)


def compare_proportions(before: Sequence[bool], after: Sequence[bool]) -> Comparison:
    """Compare two proportions of correct answers to the same questions.

    Args:
        before: [num_questions], whether each was answered correctly.
        after: [num_questions], the same questions in the same order.
    """
    change = difference_of_paired_proportions(before, after)
    one_sided = difference_of_paired_proportions(before, after, 1 - 2 * _ONE_SIDED_LEVEL)
    return Comparison(change, one_sided, p_value_of_difference(change))


def change_between(
    before: ArrayLike, after: ArrayLike, noise: Noise | None, unit: str
) -> RatioEstimate:
    """The geometric mean over units of after / before, with the parts of its variance.

    The model is log value[run, unit] = unit + run + residual. Runs of n units, r_before and r_after
    of them, then give the logarithm of that mean the variance

        unit / n + (run + residual / n) (1 / r_before + 1 / r_after)

    where `unit` is the variance over units of the true change.

    Args:
        before, after, noise, unit: as for `compare`.
    """
    sides = [_logs(before), _logs(after)]
    num_units = sides[0].shape[1]
    changes = sides[1].mean(axis=0) - sides[0].mean(axis=0)
    num_runs = [len(side) for side in sides]
    inverse_runs = sum(1 / runs for runs in num_runs)
    # How much runs of one side differ, pooled over both; 0 where neither has a second run.
    degrees_of_freedom = 0
    squares_of_means = 0.0
    residual_variance = 0.0
    for side in sides:
        mean_squares = MeanSquares.of(side)
        side_degrees = len(side) - 1
        degrees_of_freedom += side_degrees
        squares_of_means += side_degrees * mean_squares.runs / num_units
        residual_variance += side_degrees * mean_squares.residual
    if degrees_of_freedom:
        residual_variance /= degrees_of_freedom
    covers = Coverage(num_units, unit)
    if max(num_runs) > 1:
        covers = replace(covers, num_runs=num_runs[0], num_runs_after=num_runs[1])
    if noise is not None:
        covers = replace(covers, num_differences=noise.degrees_of_freedom)
        # The ratio of two runs has twice the variance of one.
        squares_of_means += noise.degrees_of_freedom * noise.deviation**2 / 2
        degrees_of_freedom += noise.degrees_of_freedom
    variance_of_means = squares_of_means / degrees_of_freedom if degrees_of_freedom else 0.0
    variance_of_changes = NAN if num_units < fewest_units(unit) else float(changes.var(ddof=1))
    # Both parts contain the residual, and one of them must not. With one run on each side it is not known, so that with
    # `noise` the interval is up to √2 too wide.
    unit_variance = variance_of_changes - residual_variance * inverse_runs
    return RatioEstimate(
        float(changes.mean()),
        covers,
        unit_variance=0.0 if unit_variance < 0 else unit_variance / num_units,
        unit_degrees_of_freedom=max(num_units - 1, 1),
        run_variance=variance_of_means * inverse_runs,
        run_degrees_of_freedom=degrees_of_freedom,
    )


def _logs(values: ArrayLike) -> Floats:
    """Logarithms as [num_runs, num_units], also of the [num_units] of one run."""
    return np.asarray(np.log(np.atleast_2d(values)))
