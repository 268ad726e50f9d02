"""Tables about the runs of a report: failures, where they ran, and which files were read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path

from harness.reporting.names import name_of
from harness.reporting.table import Column, Table, TableRow
from harness.reporting.words import short_commit
from harness.results.runs import Run, grouped

_VERSIONS = ("harness_version", "torch_version", "transformers_version", "bitsandbytes_version")
# Runs with the same values ran in the same environment.
_ENVIRONMENT = ("devices", "server", "num_threads", *_VERSIONS)
# Different values in a cell, and environments in a table.
_MOST_LISTED = 3
_MOST_ENVIRONMENTS = 6


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
    """Where the runs ran: a column for each set of devices and versions."""
    environment_of = attrgetter(*_ENVIRONMENT)
    groups = [*grouped(runs, lambda run: environment_of(run.last)).values()]
    environments = []
    for runs_there in groups[:_MOST_ENVIRONMENTS]:
        facts = [_facts(run) for run in runs_there]
        lines = {name: _listed(fact[name] for fact in facts) for name in facts[0]}
        days = sorted(run.last.timestamp[:10] for run in runs_there if run.last.timestamp)
        lines["when"] = " to ".join(dict.fromkeys([days[0], days[-1]])) if days else ""
        lines["measurements"] = str(len(runs_there))
        environments.append(lines)
    columns = [Column("", text=True, of=str)]
    for number, environment in enumerate(environments, 1):
        heading = str(number) if len(environments) > 1 else ""
        columns.append(Column(heading, text=True, of=environment.get))
    # All environments have the same lines; those that are known of none are left out.
    names = [
        name
        for name in (environments[0] if environments else ())
        if any(lines[name] for lines in environments)
    ]
    num_more = len(groups) - len(environments)
    notes = (
        (f"{num_more} more sets of devices and versions are in the CSV files.",) if num_more else ()
    )
    return Table.of("environment", "Environment", names, columns, notes=notes, in_full=True)


def files_table(files: Mapping[Path, int]) -> Table:
    """Files that were read."""
    columns = (Column("file", text=True), Column("rows"))
    rows = tuple(map(TableRow, files.items()))
    return Table("files", "Files read", columns, rows, in_full=True)


def _facts(run: Run) -> dict[str, object]:
    """The environment of one run, line by line; the same lines for every run."""
    row = run.last
    versions = {name.removesuffix("_version"): getattr(row, name) for name in _VERSIONS}
    commit = short_commit(row.commit) if row.commit else None
    return {
        "devices": row.devices,
        "server": row.server,
        "threads": None if row.is_elsewhere else row.num_threads,
        # Those of the machine that asked a server.
        "client's threads": row.num_threads if row.is_elsewhere else None,
        **versions,
        "commit": commit,
    }


def _listed(values: Iterable[object]) -> str:
    """The first different values, and how many more there are."""
    distinct = list(dict.fromkeys(str(value) for value in values if value not in (None, "")))
    num_more = len(distinct) - _MOST_LISTED
    return ", ".join(distinct[:_MOST_LISTED]) + (f" and {num_more} more" if num_more > 0 else "")
