"""Tests of drawn tokens by their places in the target's distribution after the text before them.

The tokens after a context are ordered from the likeliest down, and a token's place is the mass of
those above it, plus a random part of its own. If each token is drawn from the exact distribution
after the text before it, places are independent and uniform in [0, 1), in any text and with any
sampling setting (Rosenblatt 1952; with the random part, Brockwell 2007). So the tokens of all
requests are one sample.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from harness.experiments.lossless import (
    MIN_EXPECTED,
    ROUNDING_ALLOWANCE,
    SHARE_OF_LEVEL,
    SampledCheck,
)
from harness.experiments.outcomes import Floats
from harness.results.acceptance import Acceptance
from harness.results.statistics.chi_square import chi_square_test

# More cells see finer differences, and coarse ones less well.
_MOST_CELLS = 20
_MOST_CELLS_A_SIDE = 5
# A place is below 1.
_LARGEST_PLACE = np.nextafter(1.0, 0.0)


def places(probabilities: Floats, tokens: Sequence[int], generator: np.random.Generator) -> Floats:
    """The place of each token [n] in its distribution [n, V]."""
    rows = np.arange(len(tokens))
    own = probabilities[rows, list(tokens)][:, np.newaxis]
    above = (probabilities * (probabilities > own)).sum(-1)
    tied = (probabilities * (probabilities == own)).sum(-1)
    random_part = generator.random(len(tokens)) * tied
    return np.minimum(above + random_part, _LARGEST_PLACE)


def moved_masses(exact: Floats, other: Floats, num_cells: int) -> Floats:
    """Shares of places in `num_cells` equal cells where tokens come from `other` [n, V]."""
    edges = np.linspace(0, 1, num_cells + 1)
    masses = np.zeros(num_cells)
    for exact_row, other_row in zip(exact, other, strict=True):
        order = np.argsort(-exact_row, kind="stable")
        exact_sums = np.concatenate([[0], exact_row[order].cumsum()])
        other_sums = np.concatenate([[0], other_row[order].cumsum()])
        masses += np.diff(np.interp(edges, exact_sums, other_sums))
    return masses / masses.sum()


def num_cells_for(num_places: int) -> int:
    """How many cells a test has: each is expected to hold enough for the χ² approximation."""
    return max(1, min(_MOST_CELLS, num_places // MIN_EXPECTED))


class PlacesTest:
    """The tests of one run.

    Args:
        significance_level: each test's share of the false-alarm rate.
        shift: total variation of the distribution of places that must be seen.
    """

    def __init__(self, significance_level: float, shift: float) -> None:
        self._level = significance_level
        self._shift = shift

    def check(self, sample: Floats, moved: Floats | None = None) -> SampledCheck:
        """Test that places are uniform.

        Args:
            sample: the places [n].
            moved: from `moved_masses`, by how much rounding may move them; None for not at all.
        """
        num_cells = num_cells_for(len(sample))
        counts, _ = np.histogram(sample, num_cells, (0, 1))
        rounding = 0.0 if moved is None else _distance(moved)
        return self._check(counts, rounding)

    def check_pairs(self, texts: Sequence[Floats]) -> SampledCheck:
        """Test that neighbours in a text are independent, from the places of each text's tokens."""
        pairs = np.zeros((0, 2))
        if texts:
            pairs = np.concatenate([_neighbours(text) for text in texts])
        num_cells = len(pairs) // MIN_EXPECTED
        cells_a_side = max(1, min(_MOST_CELLS_A_SIDE, math.isqrt(num_cells)))
        first, second = pairs.T
        bounds = [(0, 1), (0, 1)]
        counts, _, _ = np.histogram2d(first, second, cells_a_side, bounds)
        return self._check(counts.ravel())

    def expected(self, num_places: int) -> SampledCheck:
        """The check of places that are spread exactly as they should be, for its power."""
        num_cells = num_cells_for(num_places)
        return self._check(np.full(num_cells, num_places / num_cells))

    def _check(self, counts: ArrayLike, rounding: float = 0.0) -> SampledCheck:
        counts = np.asarray(counts)
        num_cells = len(counts)
        num_places = round(counts.sum())
        statistic = 0.0
        visible = 0.0
        if num_cells > 1:
            uniform = np.full(num_cells, 1 / num_cells)
            statistic = chi_square_test(counts, uniform, MIN_EXPECTED).statistic
            # Every cell then has this share more or less than it should; other shifts show better.
            visible = num_places * (2 * self._shift) ** 2
        return SampledCheck(
            num_tokens=1,
            significance_level=SHARE_OF_LEVEL * self._level,
            num_prompts=1,
            num_draws=num_places,
            statistic=statistic,
            degrees_of_freedom=num_cells - 1,
            rounding=ROUNDING_ALLOWANCE * num_places * rounding,
            visible=np.array([visible]),
            acceptance=Acceptance(),
        )


def _neighbours(text: Floats) -> Floats:
    """Pairs [n // 2, 2] of a text's places [n], each in one pair."""
    num_pairs = len(text) // 2
    return text[: 2 * num_pairs].reshape(num_pairs, 2)


def _distance(masses: Floats) -> float:
    """Σ (mass − uniform)² / uniform."""
    num_cells = len(masses)
    squares = (masses - 1 / num_cells) ** 2
    return float((squares * num_cells).sum())
