"""Tables about the runs of a report: failures, where they ran, and which files were read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path

from harness.reporting.names import name_of
from harness.reporting.table import Column, Table, TableRow
from harness.reporting.words import short_commit
from harness.results.runs import Run, grouped

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
    environments = grouped(runs, lambda run: where(run.last)).values()

    def different(values: Iterable[str | None]) -> str:
        texts = list(dict.fromkeys(filter(None, values)))
        more = f" and {len(texts) - _MOST_LISTED} more" if len(texts) > _MOST_LISTED else ""
        return ", ".join(texts[:_MOST_LISTED]) + more

    def commits(alike: Sequence[Run]) -> str:
        return different(run.last.commit and short_commit(run.last.commit) for run in alike)

    def days(alike: Sequence[Run]) -> str:
        dates = sorted(run.last.timestamp[:10] for run in alike if run.last.timestamp)
        return " to ".join(dict.fromkeys([*dates[:1], *dates[-1:]]))

    columns = [
        Column("devices", text=True, of=lambda alike: alike[0].last.devices),
        Column("server", text=True, of=lambda alike: alike[0].last.server, optional=True),
        Column("threads", of=lambda alike: alike[0].last.num_threads, optional=True),
    ]
    for name in _VERSIONS:
        version: Callable[[Sequence[Run]], str | None] = partial(_in_first, name)
        columns.append(Column(name.removesuffix("_version"), of=version, optional=True))
    columns += [
        Column("commit", of=commits, text=True, optional=True),
        Column("when", of=days, text=True, optional=True),
        Column("measurements", of=len),
    ]
    return Table.of("environment", "Environment", environments, columns, in_full=True)


def files_table(files: Mapping[Path, int]) -> Table:
    """Files that were read."""
    columns = (Column("file", text=True), Column("rows"))
    rows = tuple(map(TableRow, files.items()))
    return Table("files", "Files read", columns, rows, in_full=True)


def _in_first(column: str, alike: Sequence[Run]) -> str | None:
    """A column of the first of these runs, which is the same in all."""
    value: str | None = getattr(alike[0].last, column)
    return value
