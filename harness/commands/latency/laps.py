"""Laps: how prompts are dealt out where an engine keeps requests in flight.

Requests that are in flight together are not independent of each other. So both arms take turns lap
by lap, and intervals are over laps.
"""

from __future__ import annotations

import itertools

from harness.commands.latency.record import OPEN_LOOP_LAP

# A lap begins and ends with fewer requests in flight than it should have, so laps are long where
# that leaves _MANY_LAPS of them: up to _LONGEST_LAP times the requests that are in flight at once.
_MANY_LAPS = 16
_LONGEST_LAP = 4


def choose_num_laps(num_prompts: int, batch_size: int, open_loop: bool = False) -> int:
    """Return how many laps there are: as many as prompts where one request is in flight at a time.

    128 prompts with batch_size=4 make 16 laps of 8.

    Args:
        batch_size: requests in flight at once; a lap has at least as many prompts, if there are so
            many.
        open_loop: whether requests are sent at a rate, whatever is in flight.
    """
    in_flight = max(batch_size, OPEN_LOOP_LAP) if open_loop else batch_size
    if in_flight == 1:
        return num_prompts
    turns = num_prompts // (_MANY_LAPS * in_flight)
    lap_size = in_flight * min(max(turns, 1), _LONGEST_LAP)
    return max(1, num_prompts // lap_size)


def in_laps(num_prompts: int, num_laps: int) -> list[slice]:
    """Return the prompts of each lap, whose sizes differ by one at most: 10 in 3 laps are 0:3, 3:6,
    6:10.
    """
    ends = [num_prompts * lap // num_laps for lap in range(num_laps + 1)]
    return [slice(begin, end) for begin, end in itertools.pairwise(ends)]
