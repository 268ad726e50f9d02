"""Arrays of measured values, checked."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


def positive_table(values: ArrayLike, shape: str) -> Floats:
    """The values as an array.

    Args:
        values: two-dimensional.
        shape: such as "[num_runs, num_units]", for the error.

    Raises:
        ValueError: for another number of dimensions, no values, or one that is not positive and finite.
    """
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 2 or not array.size:
        raise ValueError(f"{array.shape} is not {shape}")
    if not (array > 0).all() or not np.isfinite(array).all():
        raise ValueError("every value must be positive and finite")
    return array


def positive_tables(
    numerators: ArrayLike, denominators: ArrayLike, shape: str
) -> tuple[Floats, Floats]:
    """Both as arrays, see `positive_table`.

    Raises:
        ValueError: as for `positive_table`, and for shapes that differ.
    """
    tops = positive_table(numerators, shape)
    bottoms = positive_table(denominators, shape)
    if tops.shape != bottoms.shape:
        raise ValueError(f"numerators {tops.shape}, denominators {bottoms.shape}")
    return tops, bottoms
