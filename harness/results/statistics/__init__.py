"""Intervals, tests and power: how certain a measured number is. All are pure functions of counts and times.

A number that cannot be computed is nan, never 0. Arguments that make no sense raise ValueError. This file defines names
for the types of arrays.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]
