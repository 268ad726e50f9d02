"""How prompts are dealt out: in batches, or in laps where an engine keeps requests in flight. They are asked again,
in another order, where more answers are wanted than the set has prompts.

Requests that are in flight together are not independent of each other. So both arms take turns lap
by lap, and intervals are over laps.

With 4 prompts in batches of 2, of which 8 are asked (`batches_to_ask(4, 8, 2, seed)`):

    places     0, 1    2, 3    2, 3    0, 1
    repeats    0, 0    0, 0    1, 1    1, 1
    unit        0       1       1       0

With 3 prompts in batches of 4, of which 8 are asked, both batches share prompts. Each is then one
unit, so that an interval does not cover other prompts (`share_prompts`). The same is done where
there would otherwise be too few units for an interval:

    places     0, 1, 2, 1    2, 0, 1, 0
    repeats    0, 0, 0, 1    1, 1, 2, 2
    unit            0             1
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from harness.commands.latency.record import OPEN_LOOP_LAP
from harness.results.statistics.interval import FEWEST_FOR_INTERVAL

# A lap begins and ends with fewer requests in flight than it should have, so laps are long where
# that leaves _MANY_LAPS of them: up to _LONGEST_LAP times the requests that are in flight at once.
_MANY_LAPS = 16
_LONGEST_LAP = 4


class Part(NamedTuple):
    """Prompts that are asked together: a batch, or a lap of requests.

    Attributes:
        places: of the prompts, among those that are measured.
        repeats: how often each of them was asked before.
        unit: a number, the same whenever the same prompts are asked: their answers are not
            independent.
    """

    places: Sequence[int]
    repeats: Sequence[int]
    unit: int


def batches_to_ask(num_prompts: int, num_asked: int, size: int, seed: int) -> list[Part]:
    """Batches of the same prompts each time; batches share prompts where the set is smaller than
    one, or there would be too few batches for an interval.
    """
    too_few = size > 1 and num_prompts < FEWEST_FOR_INTERVAL * size <= num_asked
    if size > num_prompts or too_few:
        return _sharing(num_prompts, num_asked, math.ceil(num_asked / size), seed)
    parts = [slice(first, first + size) for first in range(0, num_prompts, size)]
    return _same_again(parts, num_prompts, num_asked, seed)


def laps_to_ask(
    num_prompts: int, num_asked: int, num_laps: Callable[[int], int], seed: int
) -> list[Part]:
    """Laps of the same prompts each time; laps share prompts where there would be too few laps for
    an interval.

    Args:
        num_laps: number of prompts -> number of laps that they make.
    """
    number = min(num_prompts, num_laps(num_prompts))
    one_prompt_each = number == num_prompts
    has_interval = FEWEST_FOR_INTERVAL <= number < num_laps(num_asked)
    if num_asked == num_prompts or one_prompt_each or has_interval:
        return _same_again(in_laps(num_prompts, number), num_prompts, num_asked, seed)
    return _sharing(num_prompts, num_asked, min(num_asked, num_laps(num_asked)), seed)


def share_prompts(parts: Sequence[Part]) -> bool:
    """Whether a prompt is in several units, so that an interval over these covers no prompts."""
    units = {(place, part.unit) for part in parts for place in part.places}
    return len(units) > len({place for place, _ in units})


def _same_again(parts: Sequence[slice], num_prompts: int, num_asked: int, seed: int) -> list[Part]:
    """Each part, and again in another order each time, until `num_asked` prompts have been asked."""
    units = [range(num_prompts)[part] for part in parts]
    chosen: list[Part] = []
    for unit, repeat in _again_and_again(len(units), seed):
        num_left = num_asked - sum(len(part.places) for part in chosen)
        if not num_left:
            break
        places = units[unit][:num_left]
        chosen.append(Part(places, [repeat] * len(places), unit))
    return chosen


def _sharing(num_prompts: int, num_asked: int, num_parts: int, seed: int) -> list[Part]:
    """Parts that take the prompts as they come, again and again; each is one unit."""
    requests = list(itertools.islice(_again_and_again(num_prompts, seed), num_asked))
    parts = []
    for unit, part in enumerate(in_laps(num_asked, num_parts)):
        places, repeats = zip(*requests[part], strict=True)
        parts.append(Part(places, repeats, unit))
    return parts


def _again_and_again(number: int, seed: int) -> Iterator[tuple[int, int]]:
    """All places with how often they came before, without end: in order, then in a random order
    each time.
    """
    for repeat in itertools.count():
        order = list(range(number))
        if repeat:
            random.Random(f"{seed} {repeat}").shuffle(order)
        for place in order:
            yield place, repeat


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
