"""The grids that runs of `map` measured, and a schedule as vLLM takes it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter

from harness.commands.map.rows import MapRow
from harness.reporting.names import distinct_names
from harness.results.judging.grid import Point, Schedule, points_of
from harness.results.runs import Run, grouped


def named_grids(runs: Sequence[Run[MapRow]]) -> list[tuple[str, list[Point]]]:
    """The cells of each grid, by the name that distinguishes it: `13B with 7B · temperature 1`.

    Runs that differ in nothing but their cells are one grid, of which the newest run of a cell counts.
    """
    measured = [run for run in runs if points_of(run.rows)]
    names = distinct_names([shared_row(points_of(run.rows)) for run in measured])
    by_name = grouped(zip(names, measured, strict=True), lambda named: named[0].label())
    grids = []
    for name, same in by_name.items():
        sides = attrgetter("arm", "context", "batch_size", "num_draft_tokens")
        rows = {sides(row): row for _, run in same for row in run.rows}
        grids.append((name, points_of([*rows.values()])))
    return grids


def shared_row(points: Sequence[Point]) -> MapRow:
    """A row of what all cells of a grid share: no batch size, K or number of prompts."""
    row: MapRow = points[0].row
    return replace(row, num_draft_tokens=None, batch_size=None, num_prompts=None, laps=None)


def load_of(points: Sequence[Point]) -> str:
    """The name of the load: `batch size`, or `concurrency` for the requests in flight of a server."""
    return "concurrency" if points[0].row.is_elsewhere else "batch size"


def for_vllm(schedule: Schedule) -> str:
    """The entries of vLLM's `--speculative-config` for a schedule, without those of the draft."""
    config = {
        "num_speculative_tokens": max(k for _, _, k in schedule),
        "num_speculative_tokens_per_batch_size": [list(entry) for entry in schedule],
    }
    return json.dumps(config, indent=2) + "\n"
