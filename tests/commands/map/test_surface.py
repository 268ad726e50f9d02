"""The line where speculation stops paying is found with half of the cells of a planted surface."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from harness.commands.map.surface import Cell, cells_of, explore, interpolated, next_cell

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (128, 1024, 8192)
DRAFT_TOKENS = (1, 2, 4, 8)
SHAPE = len(BATCH_SIZES), len(CONTEXTS), len(DRAFT_TOKENS)


def planted(cell: Cell, crossover: float, acceptance: float) -> float:
    """Leviathan's speed-up where verification is free up to a number of tokens, and grows with them beyond it."""
    batch, context, k = BATCH_SIZES[cell[0]], CONTEXTS[cell[1]], DRAFT_TOKENS[cell[2]]
    tokens = (1 - acceptance ** (k + 1)) / (1 - acceptance)
    free = crossover * (1 + math.log10(context / 128))
    step = max(1.0, batch / free)
    verification = max(1.0, batch * (k + 1) / free) / step
    return tokens / (0.06 * k + verification)


def first_loss(values: list[float]) -> int:
    """Place of the first batch size at which speculation does not pay; the number of places if it always does."""
    return next((place for place, value in enumerate(values) if value <= 1), len(values))


@pytest.mark.parametrize(
    ("crossover", "acceptance"), list(itertools.product((6, 20, 60), (0.5, 0.7, 0.85)))
)
def test_the_line_of_a_planted_surface_is_found_to_one_cell(
    crossover: float, acceptance: float
) -> None:
    most = math.prod(SHAPE) // 2
    asked: list[Cell] = []

    def measure(cell: Cell) -> float:
        asked.append(cell)
        return planted(cell, crossover, acceptance)

    known = explore(SHAPE, measure, most)
    assert len(asked) == len(set(asked)) == len(known) == most
    found = np.exp(interpolated(SHAPE, known))
    for context, k in itertools.product(range(SHAPE[1]), range(SHAPE[2])):
        truth = [planted((b, context, k), crossover, acceptance) for b in range(SHAPE[0])]
        here = [float(found[b, context, k]) for b in range(SHAPE[0])]
        assert abs(first_loss(here) - first_loss(truth)) <= 1, (truth, here)


def test_cells_at_random_find_the_line_worse() -> None:
    """The twin: as many cells that do not depend on what was found miss the line by more cells in all."""
    cells = list(cells_of(SHAPE))
    drawn = np.random.default_rng(0).permutation(len(cells))[: len(cells) // 2]

    def misses(known: dict[Cell, float]) -> int:
        found = np.exp(interpolated(SHAPE, known))
        pairs = itertools.product(range(SHAPE[1]), range(SHAPE[2]))
        return sum(
            abs(
                first_loss([float(found[b, c, k]) for b in range(SHAPE[0])])
                - first_loss([planted((b, c, k), 20, 0.7) for b in range(SHAPE[0])])
            )
            for c, k in pairs
        )

    at_random = {cells[place]: math.log(planted(cells[place], 20, 0.7)) for place in drawn}
    chosen = explore(SHAPE, lambda cell: planted(cell, 20, 0.7), len(cells) // 2)
    assert misses(chosen) < misses(at_random)


def test_corners_come_first_and_known_values_stay() -> None:
    known = explore((3, 1, 3), lambda cell: 2.0 + cell[0] - cell[2] / 2, 4)
    assert set(known) == {(0, 0, 0), (0, 0, 2), (2, 0, 0), (2, 0, 2)}
    values = interpolated((3, 1, 3), known)
    assert values[2, 0, 2] == known[2, 0, 2]
    assert values.min() < values[1, 0, 1] < values.max()


def test_a_grid_of_one_cell_and_a_whole_grid() -> None:
    assert explore((1, 1, 1), lambda cell: 1.5, 1) == {(0, 0, 0): pytest.approx(math.log(1.5))}
    whole = dict.fromkeys(cells_of((2, 2, 2)), 0.0)
    assert next_cell((2, 2, 2), whole) is None
