"""When enough is measured: runs that stop when their interval is narrow, and races of the jobs of a sweep."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from harness.results.statistics.interval import FEWEST_FOR_INTERVAL, Interval

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

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


# In how many shares the jobs of a race (`race=true`) are asked the prompts.
SHARES = 4
# The chance that the best job of a race leaves it, over all looks.
_FALSE_ELIMINATIONS = 0.05


def share_of(num_prompts: int, share: int) -> slice:
    """The prompts of a share, from 1 to `SHARES`: of 40 the first 8, then 6, 9 and 17; of 1,024 128, 128, 256 and 512.

    The first share has enough prompts for an interval, and after each further one the number asked so far has grown by
    the same factor; with too few prompts for that, all shares are equal.
    """
    first = max(FEWEST_FOR_INTERVAL, num_prompts // 2 ** (SHARES - 1))
    growth = (num_prompts / first) ** (1 / (SHARES - 1))
    ends = [0, *(round(first * growth**number) for number in range(SHARES))]
    if len(set(ends)) < len(ends) or growth < 1:
        ends = [num_prompts * number // SHARES for number in range(SHARES + 1)]
    return slice(*ends[share - 1 : share + 1])


def eliminated(regular: ArrayLike, speculative: ArrayLike, num_jobs: int) -> list[int]:
    """The indices of the jobs that are slower than the best of them beyond chance, at one of the looks of a race.

    Successive elimination (Even-Dar, Mannor and Mansour, "Action Elimination and Stopping Conditions", 2006). The job
    that is truly the best leaves only if one of the others beats it by chance at one of the looks: Bonferroni's
    correction is for that many one-sided comparisons, and not for all pairs, as where each is reported (`ranking`).

    Args:
        regular, speculative: [num_running, num_units], times of the arms on the same prompts.
        num_jobs: with which the race began.
    """
    # NumPy takes longer to import than --help may take.
    from harness.results.statistics.multiplicity import ranking

    num_comparisons = (SHARES - 1) * (num_jobs - 1)
    level = _FALSE_ELIMINATIONS / num_comparisons
    return [
        ranked.index for ranked in ranking(regular, speculative) if ranked.p_value_alone < level
    ]
