"""Laps: how prompts are dealt out where an engine keeps requests in flight, so that arms alternate.

Requests that are in flight together are not independent of each other. So both arms take turns lap by lap, and a lap
is what an interval is over.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from harness.decoding.protocols import Iteration
from harness.engines.counters import Counted
from harness.engines.protocol import Arm, Question
from harness.engines.requests import RequestRecord

# A lap begins and ends with fewer requests in flight than it should have. With enough prompts for
# _MANY_LAPS laps, each has up to _LONGEST_LAP times as many requests as are in flight at once.
_MANY_LAPS = 16
_LONGEST_LAP = 4
# Requests of a lap that are sent at random times.
_OPEN_LOOP_LAP = 8


def num_laps(num_prompts: int, batch_size: int, open_loop: bool = False) -> int:
    """How many laps there are: as many as prompts where one request is in flight at a time.

    Args:
        batch_size: requests in flight, none of which should be missing in a lap.
        open_loop: whether requests are sent at a rate, whatever is in flight.
    """
    in_flight = max(batch_size, _OPEN_LOOP_LAP) if open_loop else batch_size
    if in_flight == 1:
        return num_prompts
    turns = num_prompts // (_MANY_LAPS * in_flight)
    lap_size = in_flight * min(max(turns, 1), _LONGEST_LAP)
    return max(1, num_prompts // lap_size)


def in_laps(num_prompts: int, number: int) -> list[slice]:
    """The prompts of each lap; laps differ by one prompt at most."""
    ends = [num_prompts * lap // number for lap in range(number + 1)]
    return [slice(begin, end) for begin, end in itertools.pairwise(ends)]


class Twin(Arm):
    """An arm under another name, for a comparison of an arm with itself."""

    def __init__(self, name: str, arm: Arm) -> None:
        self.name = name
        self.arm = arm
        self.tells = arm.tells

    @property
    def given_up(self) -> str | None:  # type: ignore[override]
        return self.arm.given_up

    @property
    def last_requests(self) -> Sequence[RequestRecord]:  # type: ignore[override]
        return self.arm.last_requests

    def stream(self, question: Question) -> Iterator[Iteration]:
        """See `Arm.stream`."""
        return self.arm.stream(question)

    def counted(self) -> Counted | None:
        """See `Arm.counted`."""
        return self.arm.counted()
