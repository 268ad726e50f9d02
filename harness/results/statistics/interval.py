"""An estimate with its confidence interval, and what the interval covers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
NAN = float("nan")

# A bootstrap over fewer units gives an interval that is far too narrow: over two prompts it is no
# more than their range.
FEWEST_FOR_INTERVAL = 8
# Of every interval that is shown.
CONFIDENCE = 0.95
# Names of units, which are independent of each other: a prompt, a batch of prompts, a lap of requests.
# `coverage` finds them in `Interval.covers`.
UNITS = ("prompt", "batch", "lap")


@dataclass(frozen=True)
class Interval:
    """An estimate with its confidence interval.

    Where data do not suffice, the bounds or all three numbers are nan.

    Args:
        covers: the choices that the interval allows for, such as "15 prompts and 5 runs".
    """

    estimate: float = NAN
    low: float = NAN
    high: float = NAN
    covers: str = ""

    def columns(self, name: str, ends: str = "") -> dict[str, float | None]:
        """The three numbers as columns, `speedup`, `speedup_low` and `speedup_high`; nan is None.

        Args:
            ends: what the names of the bounds begin with, if not with `name`.
        """
        values = {name: self.estimate}
        values[f"{ends or name}_low"] = self.low
        values[f"{ends or name}_high"] = self.high
        return {column: None if math.isnan(value) else value for column, value in values.items()}

    @property
    def has_bounds(self) -> bool:
        return not math.isnan(self.low)

    def excludes(self, value: float) -> bool:
        """Whether the interval lies wholly on one side of the value; never without bounds."""
        return self.low > value or self.high < value


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


def counted(number: int, name: str) -> str:
    """`1 prompt`, `15 prompts`, `8 batches`."""
    if number == 1:
        return f"1 {name}"
    return f"{number} {name}{'es' if name.endswith(('ch', 's')) else 's'}"
