"""The first of several versions in order that is worse, from noisy measurements.

Bisection that knows the noise: in place of a verdict on each version, which one measurement cannot give, each version
has a chance to be the first worse one, by all measurements so far. The next one is where it halves these chances.
(Bayesian search for a change point; of probabilistic bisection see Burnashev and Zigangirov, 1974.)
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from harness.results.statistics.arrays import Floats

# Before anything is measured identical starts are taken to differ by about 1 %, which counts as much as three measured
# differences. Without it two measurements would leave every deviation possible, and equal ones none.
_EXPECTED_DEVIATION = 0.01
_ITS_WEIGHT = 3
# Scales of the noise over which likelihoods are summed.
_SCALES = np.geomspace(0.1, 40, 16) * _EXPECTED_DEVIATION
# Degrees of freedom of the noise. A start that something disturbed is seven deviations off in one of 170, not never.
_TAILS = 3
# Distances from each measurement, in scales, at which the likelihood of a level is evaluated.
_DISTANCES = np.sinh(np.linspace(-4, 4, 21))
# A version divides the chances about in halves up to this distance from one half.
_ABOUT = 0.25
# The chance from which on an answer is given. With 95 % searches among starts that differ by as much as the versions
# named a wrong one in 12 of 100, with 98 % in 6, and where nothing had changed in 4.
SURE = 0.98


def chances_of_first_worse(values: Sequence[Sequence[float]]) -> list[float]:
    """The chance of each version to be the first worse one, that of the first version being 0.

    The model is value = level before the change, or level from it on, + noise of a start, with flat priors on levels
    and positions. The noise has Student's distribution with three degrees of freedom, so that a single disturbed start
    is no level of its own (Lange et al., 1989), and an inverse gamma distribution of its squared scale. Likelihoods are
    integrated over both levels, and summed over scales.

    Args:
        values: of each version, in order, one logarithm per measurement; [] where a version was not measured. The
            first and the last version have one at least.
    """
    measured = np.array([value for version_values in values for value in version_values])
    prior = -_ITS_WEIGHT * (np.log(_SCALES) + (_EXPECTED_DEVIATION / _SCALES) ** 2 / 2)
    logs: dict[int, float] = {}
    places = [*accumulate(map(len, values[:-1]))]
    for index in places:
        # The same for all versions between two that were measured.
        if index not in logs:
            evidence = prior + _log_evidence(measured[:index]) + _log_evidence(measured[index:])
            logs[index] = float(np.logaddexp.reduce(evidence))
    likeliest = max(logs.values())
    weights = np.exp([logs[index] - likeliest for index in places])
    return [0.0, *(weights / weights.sum()).tolist()]


def _log_evidence(values: Floats) -> Floats:
    """The logarithm of the likelihood of values with one unknown level, but for a constant, for each of `_SCALES`.

    Args:
        values: [num_values].
    """
    levels = values[:, None] + _SCALES[:, None, None] * _DISTANCES
    levels = np.sort(levels.reshape(len(_SCALES), -1), axis=1)
    deviations = (levels[..., None] - values) / _SCALES[:, None, None]
    logs = -(_TAILS + 1) / 2 * np.log1p(deviations**2 / _TAILS).sum(axis=-1)
    highest = logs.max(axis=1, keepdims=True)
    integrals = np.trapezoid(np.exp(logs - highest), levels, axis=1)
    return np.asarray(np.log(integrals) + highest[:, 0] - len(values) * np.log(_SCALES))


def next_version(chances: Sequence[float], counts: Sequence[int]) -> int:
    """The place of the version to be measured next: one that about halves the chances, with the fewest starts.

    Where noise hides the change, the same one would halve them again and again, and say nothing about the others.

    Args:
        chances: as `chances_of_first_worse` gives them.
        counts: how often each version was measured.
    """
    from_half = [abs(is_worse - 0.5) for is_worse in accumulate(chances)]
    about_half = [index for index, distance in enumerate(from_half) if distance <= _ABOUT]
    if not about_half:
        return min(
            range(len(chances)), key=lambda place: (round(from_half[place], 9), counts[place])
        )
    return min(about_half, key=lambda place: (counts[place], round(from_half[place], 9)))


def smallest_range(chances: Sequence[float]) -> range:
    """The shortest range of versions that has the first worse one with a chance of `SURE`."""
    ends = [0.0, *accumulate(chances)]
    fits = [
        range(first, behind)
        for first in range(len(chances))
        for behind in range(first + 1, len(ends))
        if ends[behind] - ends[first] >= SURE - 1e-12
    ]
    return min(fits, key=len)
