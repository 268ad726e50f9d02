"""Decides when a run has measured enough: when its interval is narrow."""

from __future__ import annotations

import math
from collections.abc import Iterator

from harness.results.statistics.interval import Interval

# Number of units before the first look. With fewer, a run that happens to begin with similar units would end too early.
FIRST_LOOK = 12
# Number of blocks before the first look, each with a start of both servers. In simulations with normal blocks,
# intervals over blocks (Student's t) contain the ratio in 95 to 97 % if looked at from here on, and from three blocks
# on in 93 to 97 %.
FIRST_LOOK_AT_BLOCKS = 4
# Each look is after this many times as many units as the one before.
_GROWTH = 1.25
# The level of the intervals that stop a run. Stopping once an interval is narrow favours runs that underestimate their
# spread: 95 % intervals then contain the ratio in 91 to 94 % (`benchmarks/stopping.py`), and these in 93 to 96 %.
CONFIDENCE_OF_LOOKS = 0.97


def looks(most: int, first: int = FIRST_LOOK) -> Iterator[int]:
    """The numbers of units after which a run looks at its interval: 12, 15, 19, ... up to `most`."""
    units = first
    while units <= most:
        yield units
        units = math.ceil(units * _GROWTH)


def is_precise(interval: Interval, precision: float) -> bool:
    """Whether an interval is narrow enough to stop.

    This is the rule of Chow and Robbins ("On the Asymptotic Theory of Fixed-Width Sequential Confidence Intervals",
    1965): go on until the interval has the wanted width. The mean of n values does not depend on their spread (Basu's
    theorem for normal values), so that stopping by the spread does not bias it.

    Args:
        interval: with the level `CONFIDENCE_OF_LOOKS`.
        precision: the wanted half width, as a share of the estimate (`half_width`).
    """
    return interval.has_bounds and half_width(interval) <= precision


def half_width(interval: Interval) -> float:
    """Half of the width of an interval, as a share of its estimate; nan without bounds."""
    return (interval.high - interval.low) / 2 / interval.estimate
