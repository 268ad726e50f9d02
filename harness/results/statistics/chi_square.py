"""Pearson's χ² test that draws came from a known distribution, and what it can see.

`recovery` tests with it whether speculative decoding draws tokens from the target's own distribution.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from harness.results.statistics.arrays import Floats


@dataclass(frozen=True)
class ChiSquare:
    """Outcome of `chi_square_test`; without degrees of freedom nothing could be tested."""

    statistic: float
    degrees_of_freedom: int

    @property
    def p_value(self) -> float:
        return chi_square_p_value(self.statistic, self.degrees_of_freedom)


def chi_square_test(
    observed_counts: ArrayLike, expected_probabilities: ArrayLike, min_expected: float = 5
) -> ChiSquare:
    """Pearson's χ² test that draws came from a known distribution.

    Cells with an expected count under `min_expected` are pooled into one, and where that one is still under it, it
    takes in the smallest other cell. A draw from a cell of probability 0 refutes the distribution: the p-value is 0.

    The χ² approximation rejects too often far out in the tail, and more so with rarer cells. For one cell of a two-cell
    test with an expected count of 5, 20, 100, 1000, a nominal false-alarm rate of 1e-9 is really 1e-6, 6e-8, 1e-8,
    1.5e-9 (exact binomial sums): a test at such a level needs a `min_expected` of 100 or more.

    Args:
        observed_counts: [num_cells], how often each outcome was drawn.
        expected_probabilities: [num_cells], sums to 1 up to float32 rounding and is normalised here.

    Raises:
        ValueError: for shapes that differ, no draws, negative numbers, or probabilities that do not sum to 1.
    """
    counts = np.asarray(observed_counts, dtype=np.float64)
    probabilities = _distribution(expected_probabilities)
    if counts.shape != probabilities.shape or (counts < 0).any() or counts.sum() == 0:
        raise ValueError(
            "there must be as many counts as probabilities, none negative and at least one draw"
        )
    cells = _pooled_cells(probabilities * counts.sum(), min_expected)
    observed = _merge(counts, cells)
    expected = _merge(probabilities * counts.sum(), cells)
    impossible = bool(counts[probabilities == 0].any())
    statistic = math.inf if impossible else float(((observed - expected) ** 2 / expected).sum())
    return ChiSquare(statistic if impossible or expected.size > 1 else 0.0, expected.size - 1)


def chi_square_p_value(statistic: float, degrees_of_freedom: int, tolerated: float = 0.0) -> float:
    """Chance of a statistic at least this large; statistics of independent tests add up, and so does the rest.

    Args:
        tolerated: noncentrality that still counts as the null, number of draws times `chi_square_distance`: the
            p-value is then the largest that a distribution so far off could give.
    """
    if math.isinf(statistic) or not degrees_of_freedom:
        return float(math.isfinite(statistic))
    from scipy import stats

    return float(stats.ncx2.sf(statistic, degrees_of_freedom, tolerated))


def chi_square_tail_power(
    degrees_of_freedom: int, noncentrality: float, alpha: float, tolerated: float = 0.0
) -> float:
    """Chance that `chi_square_p_value` falls below `alpha` when the statistic has this noncentrality."""
    if not degrees_of_freedom:
        return 0.0
    from scipy import stats

    threshold = stats.ncx2.isf(alpha, degrees_of_freedom, tolerated)
    return float(stats.ncx2.sf(threshold, degrees_of_freedom, noncentrality))


def chi_square_distance(
    probabilities: ArrayLike,
    other_probabilities: ArrayLike,
    num_draws: int,
    min_expected: float = 5,
) -> float:
    """Σ (other − p)² / p over the cells that `chi_square_test` would pool them into."""
    null = _distribution(probabilities)
    other = _distribution(other_probabilities)
    cells = _pooled_cells(null * num_draws, min_expected)
    merged = _merge(null, cells)
    merged_other = _merge(other, cells)
    return float(((merged_other - merged) ** 2 / merged).sum())


def least_visible_shift(probabilities: ArrayLike, total_variation: float) -> Floats:
    """The distribution at this total-variation distance that a χ² test is least able to see, nearly.

    For a given distance Σ (other − p)² / p is least, 4 distance², when every probability changes by the same share. So
    the cells are dealt into two halves of about the same mass, of which the lighter gains what the heavier loses. With
    a single possible outcome nothing can shift, and the distribution is returned as it is. At a distance of 0.1,
    [0.5, 0.3, 0.2] becomes [0.6, 0.24, 0.16].

    Raises:
        ValueError: for a distance that is not in (0, 0.5].
    """
    values = _distribution(probabilities)
    if not 0 < total_variation <= 0.5:
        raise ValueError(f"total_variation must be in (0, 0.5]: {total_variation}")
    masses = [0.0, 0.0]
    half = np.zeros(values.size, dtype=np.intp)
    for index in np.argsort(-values, kind="stable"):
        half[index] = lighter = int(masses[1] < masses[0])
        masses[lighter] += float(values[index])
    gaining = half == int(masses[1] < masses[0])
    gained = values[gaining].sum()
    if gained == 0:
        return values
    shifted = values * np.where(
        gaining, 1 + total_variation / gained, 1 - total_variation / (1 - gained)
    )
    return np.asarray(shifted / shifted.sum())


def _distribution(probabilities: ArrayLike) -> Floats:
    """Probabilities that sum to 1 exactly, after a look at them."""
    values = np.asarray(probabilities, dtype=np.float64)
    if (
        values.ndim != 1
        or not (values >= 0).all()
        or not math.isclose(values.sum(), 1, abs_tol=1e-3)
    ):
        raise ValueError(
            "probabilities must be one list of numbers that are not negative and sum to 1"
        )
    return np.asarray(values / values.sum())


def _pooled_cells(expected: Floats, min_expected: float) -> NDArray[np.intp]:
    """The pooled cell that each cell belongs to; -1 for those expected never.

    Expected counts of [0, 1, 2, 9, 40] with `min_expected=5` give [-1, 0, 0, 0, 1]: 1 and 2 are pooled, and because
    they are still below 5 together, 9 joins them.
    """
    cells = np.full(expected.shape, -1, dtype=np.intp)
    # From the rarest up; the pool is the front of this order, so that growing it always takes the smallest other cell.
    order = np.argsort(expected, kind="stable")
    order = order[expected[order] > 0]
    num_pooled = int((expected[order] < min_expected).sum())
    if 0 < num_pooled < order.size and expected[order[:num_pooled]].sum() < min_expected:
        num_pooled += 1
    cells[order] = np.maximum(np.arange(order.size) - max(num_pooled - 1, 0), 0)
    return cells


def _merge(values: Floats, cells: NDArray[np.intp]) -> Floats:
    """The sum of the values of each pooled cell."""
    return np.asarray(np.bincount(cells[cells >= 0], weights=values[cells >= 0]), dtype=np.float64)
