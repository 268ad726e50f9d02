"""A line through ratios of totals, such as the time of an iteration by its draft tokens, with intervals over units."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from harness.results.statistics.arrays import Floats
from harness.results.statistics.interval import FEWEST_FOR_INTERVAL, Coverage, Interval
from harness.results.statistics.ratios import bootstrapped


class FittedLine(NamedTuple):
    """Where a line meets x = 0, and how it rises."""

    intercept: Interval
    slope: Interval


def line_of_ratios(
    places: Sequence[float], numerators: Floats, denominators: Floats, unit: str, seed: int = 0
) -> FittedLine:
    """The least-squares line through Σ numerators / Σ denominators at each place.

    The same units were measured at all places, so they are drawn together.

    Args:
        places: x of each point, of which at least two are different.
        numerators, denominators: [num_points, num_units]; below 8 units there are no bounds.
        unit: name of a unit.
    """
    design = np.stack([np.ones(len(places)), np.asarray(places, float)], axis=1)
    weights = np.linalg.pinv(design)
    num_points, num_units = numerators.shape
    covers = Coverage(num_units, unit) if num_units >= FEWEST_FOR_INTERVAL else None
    fitted = []
    for weights_of_one in weights:

        def coefficient(*data: Floats, axis: int, weights: Floats = weights_of_one) -> Floats:
            totals = [values.sum(axis=axis) for values in data]
            ratios = np.stack(totals[:num_points]) / np.stack(totals[num_points:])
            return np.tensordot(weights, ratios, axes=1)

        data = [*numerators, *denominators]
        estimate = float(coefficient(*data, axis=-1))
        low, high = bootstrapped(data, coefficient, seed=seed)
        fitted.append(Interval(estimate, low, high, covers))
    return FittedLine(*fitted)
