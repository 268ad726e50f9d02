"""Decides when a run has measured enough: when its interval is narrow enough."""

from __future__ import annotations

import math
from collections.abc import Iterator

from harness.results.statistics.interval import Interval

# A *look* compares the interval with the wanted precision. This many units are measured before the first look: after
# fewer, a run that happens to begin with similar units would stop too early.
FIRST_LOOK = 12
# Number of blocks before the first look; each block begins with a start of both servers. In simulations with normally
# distributed blocks, intervals over blocks (Student's t) contained the ratio in 95 to 97 % of the runs if the first
# look was after four blocks, and in 93 to 97 % if it was after three.
FIRST_LOOK_AT_BLOCKS = 4
# The factor from the number of units at one look to the number at the next look.
_GROWTH = 1.25
# The level of the intervals of a run that may stop early. Stopping at a narrow interval favours runs that underestimate
# their spread. Intervals of level 95 % then contained the ratio in 91 to 94 % of the runs (`benchmarks/stopping.py`),
# and intervals of this level in 93 to 96 %.
CONFIDENCE_OF_LOOKS = 0.97


def looks(most: int, first: int = FIRST_LOOK) -> Iterator[int]:
    """Yield the numbers of units after which a run looks at its interval, from `first` up to `most`: 12, 15, 19, ..."""
    units = first
    while units <= most:
        yield units
        units = math.ceil(units * _GROWTH)


def is_precise(interval: Interval, precision: float) -> bool:
    """Whether an interval is narrow enough to stop.

    This is the rule of Chow and Robbins ("On the Asymptotic Theory of Fixed-Width Sequential Confidence Intervals",
    1965): measure until the interval has the wanted width. For normal values, the mean is independent of the spread
    (Basu's theorem), so that stopping by the spread does not bias the mean.

    Args:
        interval: an interval of level `CONFIDENCE_OF_LOOKS`; without bounds it is never narrow enough.
        precision: the wanted half width, as a share of the estimate (`half_width`).
    """
    return interval.has_bounds and half_width(interval) <= precision


def half_width(interval: Interval) -> float:
    """Half the width of an interval, as a share of its estimate; nan without bounds."""
    return (interval.high - interval.low) / 2 / interval.estimate
