"""When a run has measured enough: fixed-width sequential intervals."""

from __future__ import annotations

import math
from collections.abc import Iterator

from harness.results.statistics.interval import Interval

# Units before the first look. With fewer, a run that happens to begin with alike units ends too early.
FIRST_LOOK = 12
# Each look is at this many times the units of the one before.
_GROWTH = 1.25
# The level of intervals that a run is stopped by. Stopping when an interval is narrow favours runs that underestimate
# their spread: 95 % intervals then cover 91 to 94 % (`benchmarks/stopping.py`), these 93 to 96 %.
CONFIDENCE_OF_LOOKS = 0.97


def looks(most: int) -> Iterator[int]:
    """The numbers of units after which a run looks at its interval: 12, 15, 19, ... up to `most`."""
    units = FIRST_LOOK
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
        precision: half of the width, as a share of the estimate.
    """
    return (
        interval.has_bounds and (interval.high - interval.low) / 2 <= precision * interval.estimate
    )
