"""Requests at a rate: when each is sent, and when those before them have built up the load that is to be measured."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

from harness.engines.protocol import Request

# At a rate a load has built up when this many times as many requests have ended as were in flight at most, or this
# many where a server does not keep up. A simulated server at 72 % (85 %) of what it can do then answers within 7 %
# (24 %) of the time that it comes to; after the first end alone within 23 % (46 %).
_LEAD = 2
_MOST_LEADING = 64


def arrival_times(requests: Sequence[Request], rate: float) -> list[float]:
    """The seconds at which requests are sent, at random (Poisson) times.

    They follow from the seed and the prompts, so that both arms are asked at the same times, and
    other prompts at others.

    Args:
        rate: requests per second on average.
    """
    drawn = random.Random(f"{requests[0].seed} {requests[0].index}")
    return list(itertools.accumulate(drawn.expovariate(rate) for _ in requests))


def has_built_up(num_ended: int, most_in_flight: int) -> bool:
    """Whether requests that are sent at a rate, from none on, have built up the load that is to be measured."""
    return num_ended >= min(max(1, _LEAD * most_in_flight), _MOST_LEADING)
