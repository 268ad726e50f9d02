"""Chances to be the first worse version, against scipy's distributions; what is measured next, and what is named."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from scipy import stats

from harness.results.statistics.first_worse import (
    chances_of_first_worse,
    next_version,
    smallest_range,
)


def likelihood(values: Sequence[float], scale: float) -> float:
    """Of values around any level, with noise that has Student's distribution."""
    levels = np.linspace(min(values) - 60 * scale, max(values) + 60 * scale, 5_001)
    densities = stats.t.pdf(np.array(values), 3, levels[:, np.newaxis], scale)
    return float(np.trapezoid(densities.prod(axis=1), levels))


@pytest.mark.parametrize(
    "values",
    [[[0.0], [0.03], [0.1]], [[0.0, 0.02], [0.03], [], [0.01, 0.06], [0.05]]],
)
def test_chances_are_those_of_the_stated_model(values: list[list[float]]) -> None:
    """Three differences of about 1 % are known before: a squared scale has an inverse gamma distribution."""
    scales = np.geomspace(0.001, 0.4, 16)
    prior = scales**2 * stats.invgamma.pdf(scales**2, 1.5, scale=1.5 * 0.01**2)
    weights = []
    for index in range(1, len(values)):
        before, after = np.concatenate(values[:index]), np.concatenate(values[index:])
        both = [likelihood(before, scale) * likelihood(after, scale) for scale in scales]
        weights.append(prior @ both)
    expected = [0.0, *(np.array(weights) / sum(weights))]
    assert chances_of_first_worse(values) == pytest.approx(expected, abs=0.005)


@pytest.mark.parametrize(
    ("chances", "counts", "version"),
    [
        # Versions 2 and 3 have 0.3 and 0.6 up to them: the nearer to one half, or the one with fewer starts.
        ([0.0, 0.1, 0.2, 0.3, 0.4], [9, 9, 0, 0, 9], 3),
        ([0.0, 0.1, 0.2, 0.3, 0.4], [9, 0, 0, 1, 0], 2),
        # None is about one half: 0.2 is as far from it as 0.8.
        ([0.0, 0.2, 0.6, 0.2], [0, 3, 1, 0], 2),
        ([0.0, 0.1, 0.7, 0.2], [0, 0, 1, 0], 2),
    ],
)
def test_the_next_version_about_halves_the_chances(
    chances: list[float], counts: list[int], version: int
) -> None:
    assert next_version(chances, counts) == version


def test_the_shortest_range_with_98_percent_is_named() -> None:
    assert smallest_range([0.0, 0.01, 0.97, 0.01, 0.01]) == range(1, 3)
    assert smallest_range([0.0, 0.01, 0.98, 0.01]) == range(2, 3)
