"""Chooses the cells of a grid to measure, so that a few cells find the break-even line.

On that line the logarithm of the speed-up is 0: speculation stops paying there.

The other cells are interpolated between their neighbours, on the logarithm of the speed-up.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray
from scipy.interpolate import RBFInterpolator

# Indices along the sides of the grid, which are batch size, context and K: (0, 2, 1) is the
# smallest batch, the third context and the second K.
Cell = tuple[int, ...]
Floats = NDArray[np.float64]

# Log speed-ups below this count as equally near the break-even line: 3 %.
_NEAR_THE_LINE = 0.03


def cells_of(shape: tuple[int, ...]) -> Iterator[Cell]:
    """Yield every cell of a grid."""
    return itertools.product(*map(range, shape))


def interpolated(shape: tuple[int, ...], known: Mapping[Cell, float]) -> Floats:
    """Return a value for every cell of a grid, exact where it is known.

    Args:
        known: the known values by cell, at least one.
    """
    if len(known) == 1:
        return np.full(shape, next(iter(known.values())))
    everywhere = _coordinates(shape, list(cells_of(shape)))
    known_coordinates = _coordinates(shape, list(known))
    surface = RBFInterpolator(
        known_coordinates, np.array(list(known.values())), kernel="linear", degree=0
    )
    values = np.asarray(surface(everywhere), dtype=np.float64).reshape(shape)
    for cell, value in known.items():
        values[cell] = value
    return values


def next_cell(shape: tuple[int, ...], known: Mapping[Cell, float | None]) -> Cell | None:
    """The cell to measure next: a corner of the grid, else the one whose interpolated value has the
    least certain sign; None if all are known.

    Args:
        known: logarithms of speed-ups by cell; None where a cell was measured and has none.
    """
    unknown = [cell for cell in cells_of(shape) if cell not in known]
    if not unknown:
        return None
    ends = [(0, size - 1) for size in shape]
    corners = [
        cell for cell in unknown if all(place in end for place, end in zip(cell, ends, strict=True))
    ]
    if corners:
        # Corners of equal K, the last side, one after the other: some engines restart for another
        # K.
        return min(corners, key=lambda cell: cell[::-1])
    measured = {cell: value for cell, value in known.items() if value is not None}
    if not measured:
        return unknown[0]
    values = interpolated(shape, measured)
    places = _coordinates(shape, list(known))

    def doubt(cell: Cell) -> float:
        """Large far from measured cells and near the break-even line."""
        distances = np.linalg.norm(places - _coordinates(shape, [cell]), axis=1)
        return float(distances.min() / (abs(values[cell]) + _NEAR_THE_LINE))

    return max(unknown, key=doubt)


def explore(
    shape: tuple[int, ...], measure: Callable[[Cell], float | None], most_cells: int
) -> dict[Cell, float | None]:
    """Measure at most `most_cells` cells of a grid, and the corners in any case.

    Args:
        measure: gives the speed-up of a cell; None where the cell has none.

    Returns:
        The logarithms of the speed-ups that were measured.
    """
    known: dict[Cell, float | None] = {}
    num_corners = math.prod(min(size, 2) for size in shape)
    while len(known) < max(most_cells, num_corners):
        cell = next_cell(shape, known)
        if cell is None:
            break
        speedup = measure(cell)
        known[cell] = None if speedup is None else math.log(speedup)
    return known


def _coordinates(shape: tuple[int, ...], cells: list[Cell]) -> Floats:
    """Places between 0 and 1 along each side of the grid."""
    sides = np.array([max(1, size - 1) for size in shape], dtype=np.float64)
    return np.array(cells, dtype=np.float64) / sides
