"""The measured points of a map, whether it pays at each, and the best K for each load."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from operator import attrgetter
from statistics import fmean
from typing import NamedTuple

from harness.commands.map.rows import MapRow
from harness.reporting.names import distinct_names
from harness.results.runs import Run, grouped
from harness.results.schema import NO_VERDICT
from harness.results.verdict import Verdict, verdict_of

# First and last batch size of each range, and its K. The ranges are adjacent, and the first begins at 1.
Schedule = Sequence[tuple[int, int, int]]

PAYS = "pays"
DOES_NOT_PAY = "does not pay"
# No interval, or one that includes 1.
CANNOT_TELL = "cannot tell"
_WORDS = {"faster": PAYS, "slower": DOES_NOT_PAY}


class Point(NamedTuple):
    """A point of the grid, from the row of its speculative arm.

    Attributes:
        context: the length to which prompts are cut, in tokens; 0 for prompts as they are.
        size: the batch size; of a server, the requests in flight.
        k: the number of draft tokens; 0 where a server does not report its own.
    """

    context: int
    size: int
    k: int
    verdict: Verdict
    row: MapRow

    @property
    def word(self) -> str:
        """The verdict in a word: `pays`, `does not pay` or `cannot tell`."""
        return _WORDS.get(self.verdict.conclusion, CANNOT_TELL)


def points_of(rows: Sequence[MapRow]) -> list[Point]:
    """Return the points with a speed-up, or without a verdict, by context, batch size and K."""
    points = []
    for row in rows:
        verdict = verdict_of(row)
        is_measured = verdict.speedup.is_known or row.status == NO_VERDICT
        if row.arm == "speculative" and is_measured:
            k = int(row.num_draft_tokens or 0)
            points.append(Point(row.context or 0, row.batch_size or 1, k, verdict, row))
    return sorted(points, key=attrgetter("context", "size", "k"))


def named_points(runs: Sequence[Run[MapRow]]) -> dict[str, list[Point]]:
    """Return the points of each run that has any, by the name that distinguishes it: `13B with 7B · temperature 1`."""
    maps = [points for points in (points_of(run.rows) for run in runs) if points]
    names = distinct_names([shared_row(points) for points in maps])
    return {name.label(): points for name, points in zip(names, maps, strict=True)}


def shared_row(points: Sequence[Point]) -> MapRow:
    """Return a row of what all points of a map share: no batch size, K or number of prompts."""
    return replace(
        points[0].row, num_draft_tokens=None, batch_size=None, num_prompts=None, laps=None
    )


def load_of(points: Sequence[Point]) -> str:
    """Return the name of the load: `batch size`, or `concurrency` for the requests in flight of a server."""
    return "concurrency" if points[0].row.is_elsewhere else "batch size"


def schedule_of(points: Sequence[Point]) -> tuple[Schedule, str]:
    """Return the best K of each batch size over all contexts, 0 where none pays; without a schedule,
    none and the reason.

    Points that cannot tell decide nothing: a batch size that has no others gets the K of the next
    smaller one. K=0 counts as if switching the draft off were free.

    With K=5 best at batch size 1, K=2 at 16 and none at 64: [(1, 15, 5), (16, 63, 2), (64, 64, 0)].
    """
    if not any(point.k for point in points):
        return [], "the server does not report its K"
    best: dict[int, int] = {}
    for size, at_size in sorted(grouped(points, attrgetter("size")).items()):
        decided = [point for point in at_size if point.word != CANNOT_TELL]
        # Logarithms, so that twice as fast and half as fast cancel out.
        gains = {
            k: fmean(math.log(point.verdict.speedup.estimate) for point in with_k)
            for k, with_k in grouped(decided, attrgetter("k")).items()
        }
        if gains:
            best_k = max(gains, key=lambda k: gains[k])
            best[size] = best_k if gains[best_k] > 0 else 0
        elif not best:
            return [], f"no cell can tell whether it pays at {load_of(points)} {size}"
    if not any(best.values()):
        return [], "it clearly pays at no load"
    # A range begins at each batch size whose K differs from that of the smaller one.
    firsts = [size for before, size in pairwise([0, *best]) if best.get(before) != best[size]]
    lasts = [first - 1 for first in firsts[1:]] + [max(best)]
    # vLLM needs a K from 1 on, although the smallest measured batch size may be larger.
    schedule = [
        (first if index else 1, last, best[first])
        for index, (first, last) in enumerate(zip(firsts, lasts, strict=True))
    ]
    return schedule, ""


def for_vllm(schedule: Schedule) -> str:
    """Return the entries of vLLM's `--speculative-config` for a schedule, without those of the draft."""
    config = {
        "num_speculative_tokens": max(k for _, _, k in schedule),
        "num_speculative_tokens_per_batch_size": [list(entry) for entry in schedule],
    }
    return json.dumps(config, indent=2) + "\n"
