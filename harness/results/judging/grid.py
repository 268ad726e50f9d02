"""Runs over load, context and K, judged together: where speculation pays, and which K to use at each load."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from operator import attrgetter
from typing import Any

from harness.results.judging.series import Member
from harness.results.runs import Run, grouped
from harness.results.schema import NO_VERDICT

# First and last batch size of each range, and its K. The ranges are adjacent, and the first begins at 1.
Schedule = Sequence[tuple[int, int, int]]


def cells_of(rows: Sequence[Any]) -> list[Run[Any]]:
    """The cells of a map, each as a run of `latency`: the row of its regular arm, then that of the speculative one.

    A cell that has rows is whole, although its map may have been interrupted.
    """
    cells: list[list[Any]] = []
    for row in rows:
        whole = row if row.status == NO_VERDICT else replace(row, status="ok")
        if row.arm == "speculative" and cells and cells[-1][-1].arm == "regular":
            cells[-1].append(whole)
        else:
            cells.append([whole])
    return [Run(cell) for cell in cells]


def highest_cell(cells: Sequence[Member]) -> Member | None:
    """The cell with the highest speed-up of those that pay, else of all with an interval; None without any."""
    decidable = [cell for cell in cells if cell.verdict.is_judged]
    paying = [cell for cell in decidable if cell.verdict.pays]
    return max(paying or decidable, key=lambda cell: cell.verdict.interval.estimate, default=None)


def schedule_of(cells: Sequence[Member]) -> tuple[Schedule, str]:
    """The K to use at each batch size, 0 for none; without a schedule, none and the reason.

    Of several K that are shown to pay at a batch size the one with the highest speed-up is taken. Where none is, the K
    of the next smaller size stays, unless it is shown to lose: then there is none. K=0 counts as if switching the draft
    off were free.

    With K=5 best at batch size 1, K=2 at 16 and a loss at 64: [(1, 15, 5), (16, 63, 2), (64, 64, 0)].

    Args:
        cells: with one context.
    """
    if not any(cell.sides.k for cell in cells):
        return [], "the server does not report its K"
    ordered = sorted(cells, key=attrgetter("sides.size", "sides.k"))
    chosen: dict[int, int] = {}
    k: int | None = None
    for size, at_size in grouped(ordered, attrgetter("sides.size")).items():
        k = _chosen(at_size, k)
        if k is None:
            return [], f"nothing is shown at the smallest load, {size}"
        chosen[size] = k
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


def _chosen(cells: Sequence[Member], smaller: int | None) -> int | None:
    """The K to use at a batch size; None where nothing is shown.

    Args:
        cells: of one batch size.
        smaller: the K of the next smaller one; None for the smallest.
    """
    paying = [cell for cell in cells if cell.verdict.pays]
    if paying:
        return max(paying, key=lambda cell: cell.verdict.interval.estimate).sides.k
    losing = [cell.sides.k for cell in cells if cell.verdict.relation == "below"]
    if len(losing) == len(cells) or smaller in losing:
        return 0
    return smaller


def schedule_file(context: int) -> str:
    """The file of a schedule: of contexts, one for each number of tokens; 0 for prompts as they are."""
    return f"schedule_vllm_{context}.json" if context else "schedule_vllm.json"


def for_vllm(schedule: Schedule) -> str:
    """The entries of vLLM's `--speculative-config` for a schedule, without those of the draft."""
    config = {
        "num_speculative_tokens": max(k for _, _, k in schedule),
        "num_speculative_tokens_per_batch_size": [list(entry) for entry in schedule],
    }
    return json.dumps(config, indent=2) + "\n"
