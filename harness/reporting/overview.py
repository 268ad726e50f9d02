"""Tables about many runs: those without a verdict, where they ran, and which files were read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from harness.reporting.names import Named, distinct_names
from harness.reporting.table import Column, Table, TableRow, times
from harness.reporting.words import short_commit
from harness.results.runs import Run, grouped
from harness.results.schema import ComparedRow, RunRow
from harness.results.statistics.interval import Interval
from harness.results.verdict import verdict_of

_VERSIONS = ("harness_version", "torch_version", "transformers_version", "bitsandbytes_version")
# Commits in a cell.
_MOST_LISTED = 3


def without_verdict_table(runs: Sequence[Run]) -> Table:
    """Runs without a verdict, each with its reason."""
    names = distinct_names([run.last for run in runs])
    columns = (
        Column("command", text=True, of="run.command", varies=True),
        Column("pair", text=True, of="name.cell"),
        Column("K", of="name.num_draft_tokens", optional=True, identifies_row=True),
        Column("why", text=True, of="run", form=_why),
        Column("speed-up\nin this run", times, _estimate, optional=True).at("run"),
        Column("run", text=True, of="run.id"),
    )
    named = [Named(name, run, run.last) for name, run in zip(names, runs, strict=True)]
    return Table.of("unjudged", "", named, columns, faint=lambda named: True)


def _why(run: Run[Any]) -> str:
    """`interrupted: Ctrl-C`, `no interval from fewer than 8 prompts`."""
    if run.status == "ok":
        return verdict_of(run.last).why
    return f"{run.status.replace('_', ' ')}: {run.reason}"


def _estimate(run: Run[Any]) -> float | None:
    """The speed-up of the prompts that were measured; None where it is unknown, or one of several."""
    is_compared = isinstance(run.last, ComparedRow) and len(run.rows) == 2
    interval = verdict_of(run.last).interval if is_compared else Interval()
    return interval.estimate if interval.is_known else None


def environment_table(runs: Sequence[Run]) -> Table:
    """Where the runs ran: a row for each set of devices and versions."""
    where = attrgetter("devices", "server", "num_threads", *_VERSIONS)
    columns = (
        Column("devices", text=True),
        Column("server", text=True, optional=True),
        Column("threads", optional=True),
        *(Column(name.removesuffix("_version"), optional=True) for name in _VERSIONS),
        Column("commit", text=True, optional=True),
        Column("when", text=True, optional=True),
        Column("measurements"),
    )
    rows = []
    for alike in grouped(runs, lambda run: where(run.last)).values():
        distinct = dict.fromkeys(short_commit(run.last.commit) for run in alike if run.last.commit)
        commits = ", ".join([*distinct][:_MOST_LISTED])
        if len(distinct) > _MOST_LISTED:
            commits += f" and {len(distinct) - _MOST_LISTED} more"
        cells = (*where(alike[0].last), commits, days_of([run.last for run in alike]), len(alike))
        rows.append(TableRow(cells))
    return Table("environment", "Environment", columns, tuple(rows), in_full=True)


def days_of(rows: Sequence[RunRow]) -> str:
    """`2026-11-24`, or `2026-11-24 to 2026-11-26`; empty where no row has a time."""
    dates = sorted(row.timestamp[:10] for row in rows if row.timestamp)
    return " to ".join(dict.fromkeys([*dates[:1], *dates[-1:]]))


def files_table(files: Mapping[Path, int]) -> Table:
    """Files that were read."""
    columns = (Column("file", text=True), Column("rows"))
    rows = tuple(map(TableRow, files.items()))
    return Table("files", "Files read", columns, rows, in_full=True)
