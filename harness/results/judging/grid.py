"""Cells over load, context and K, judged together: where speculation pays, and which K to use at each load."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from operator import attrgetter
from statistics import fmean
from typing import Any, NamedTuple

from harness.results.judging.statement import Statement
from harness.results.runs import grouped
from harness.results.schema import NO_VERDICT
from harness.results.verdict import verdict_of

# First and last batch size of each range, and its K. The ranges are adjacent, and the first begins at 1.
Schedule = Sequence[tuple[int, int, int]]


class Point(NamedTuple):
    """A cell of a grid, from the row of its speculative arm.

    Attributes:
        context: the length to which prompts are cut, in tokens; 0 for prompts as they are.
        size: the batch size; of a server, the requests in flight.
        k: the number of draft tokens; 0 where a server does not report its own.
        alone: its speed-up by itself.
        at_once: the same by an interval that holds for all cells of the grid.
        row: of `map`.
    """

    context: int
    size: int
    k: int
    alone: Statement
    at_once: Statement
    row: Any


def points_of(rows: Sequence[Any]) -> list[Point]:
    """The cells of one grid with a speed-up, or without a verdict, by context, batch size and K."""
    judged = [(row, verdict_of(row)) for row in rows if row.arm == "speculative"]
    family = max(1, sum(alone.has_interval for _, alone in judged))
    points = []
    for row, alone in judged:
        if alone.interval.is_known or row.status == NO_VERDICT:
            sides = (row.context or 0, row.batch_size or 1, int(row.num_draft_tokens or 0))
            points.append(Point(*sides, alone, verdict_of(row, family), row))
    return sorted(points, key=attrgetter("context", "size", "k"))


def highest(points: Sequence[Point]) -> Point | None:
    """The cell with the highest speed-up of those that pay, else of all with an interval; None without any."""
    decidable = [point for point in points if point.at_once.has_interval]
    paying = [point for point in decidable if point.at_once.pays]
    return max(paying or decidable, key=lambda point: point.alone.interval.estimate, default=None)


def schedule_of(points: Sequence[Point]) -> tuple[Schedule, str]:
    """The K to use at each batch size, 0 where none is shown to pay at every context; without a schedule, none and the
    reason.

    Of several K that pay the one with the highest mean speed-up is taken. A batch size without any interval gets the K
    of the next smaller one. K=0 counts as if switching the draft off were free.

    With K=5 best at batch size 1, K=2 at 16 and none at 64: [(1, 15, 5), (16, 63, 2), (64, 64, 0)].
    """
    if not any(point.k for point in points):
        return [], "the server does not report its K"
    chosen: dict[int, int] = {}
    for size, at_size in sorted(grouped(points, attrgetter("size")).items()):
        # Logarithms, so that twice as fast and half as fast cancel out.
        gains = {
            k: fmean(math.log(point.alone.interval.estimate) for point in with_k)
            for k, with_k in grouped(at_size, attrgetter("k")).items()
            if all(point.at_once.pays for point in with_k)
        }
        if gains:
            chosen[size] = max(gains, key=lambda k: gains[k])
        elif any(point.at_once.has_interval for point in at_size):
            chosen[size] = 0
        elif not chosen:
            return [], f"no cell has an interval at the smallest load, {size}"
    if not any(chosen.values()):
        return [], "no K is shown to pay at any load"
    # A range begins at each batch size whose K differs from that of the smaller one.
    firsts = [size for before, size in pairwise([0, *chosen]) if chosen.get(before) != chosen[size]]
    lasts = [first - 1 for first in firsts[1:]] + [max(chosen)]
    # vLLM needs a K from 1 on, although the smallest measured batch size may be larger.
    schedule = [
        (first if index else 1, last, chosen[first])
        for index, (first, last) in enumerate(zip(firsts, lasts, strict=True))
    ]
    return schedule, ""
