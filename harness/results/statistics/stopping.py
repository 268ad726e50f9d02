"""When enough is measured: runs that stop when their interval is narrow."""

from __future__ import annotations

import math
from collections.abc import Iterator

from harness.results.statistics.interval import Interval

# Units before the first look. With fewer, a run that happens to begin with alike units ends too early.
FIRST_LOOK = 12
# The same of blocks, each with a start of both servers. The intervals over blocks that are looked at from here on cover
# 95 to 97 % in simulations with normal blocks (Student's t); from three blocks on they would cover 93 to 97 %.
FIRST_LOOK_AT_BLOCKS = 4
# Each look is at this many times the units of the one before.
_GROWTH = 1.25
# The level of intervals that a run is stopped by. Stopping when an interval is narrow favours runs that underestimate
# their spread: 95 % intervals then cover 91 to 94 % (`benchmarks/stopping.py`), these 93 to 96 %.
CONFIDENCE_OF_LOOKS = 0.97


def looks(most: int, first: int = FIRST_LOOK) -> Iterator[int]:
    """The numbers of units after which a run looks at its interval: 12, 15, 19, ... up to `most`."""
    units = first
    while units <= most:
        yield units
        units = math.ceil(units * _GROWTH)


def is_precise(interval: Interval, precision: float) -> bool:
    """Whether an interval is narrow enough to stop.

    The rule of Chow and Robbins ("On the Asymptotic Theory of Fixed-Width Sequential Confidence Intervals", 1965): go
    on until the interval has the width that was asked for. The mean of n values does not depend on their spread (Basu's
    theorem for normal values), so that stopping by the spread does not bias it.

    Args:
        interval: with level `CONFIDENCE_OF_LOOKS`.
        precision: half of the width, as a share of the estimate (`half_width`).
    """
    return interval.has_bounds and half_width(interval) <= precision


def half_width(interval: Interval) -> float:
    """Half of the width of an interval, as a share of its estimate."""
    return (interval.high - interval.low) / 2 / interval.estimate
