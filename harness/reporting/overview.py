"""Tables about the runs of a report: failures, where they ran, and which files were read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import Path

from harness.reporting.names import name_of
from harness.reporting.table import Column, Table, TableRow
from harness.reporting.words import short_commit
from harness.results.runs import Run, grouped
from harness.results.schema import RunRow

_VERSIONS = ("harness_version", "torch_version", "transformers_version", "bitsandbytes_version")
# Commits in a cell.
_MOST_LISTED = 3


def failures_table(failures: Sequence[Run]) -> Table:
    """Runs without a full result, with their reasons."""
    columns = (
        Column("command", text=True, of="command"),
        Column(
            "pair", text=True, of=lambda run: name_of(run.last).label() if run.last.model else None
        ),
        Column("status", text=True, of="status"),
        Column("reason", text=True, of="reason"),
        Column("where", text=True, of=lambda run: run.directory or run.file),
    )
    return Table.of("failures", "Without a full result", failures, columns)


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
