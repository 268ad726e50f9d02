"""Tables about the runs of a report: failures, where they ran, and which files were read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from harness.commands.names import name_of
from harness.commands.read_runs import Run
from harness.commands.words import short_commit
from harness.engines.registry import is_elsewhere
from harness.tables.table import Column, Table, TableRow, grouped

_VERSIONS = ("harness_version", "torch_version", "transformers_version", "bitsandbytes_version")
# Runs with the same values ran in the same environment.
_ENVIRONMENT = ("devices", "server", "num_threads", *_VERSIONS)
# Different values in a cell.
_MOST_LISTED = 3


def failures_table(failures: Sequence[Run]) -> Table:
    """Runs without a full result, with their reasons."""
    columns = (
        Column("command", text=True, of="command"),
        Column("pair", text=True, of=_pair),
        Column("status", text=True, of="status"),
        Column("reason", text=True, of="reason"),
        Column("where", text=True, of=lambda run: run.directory or run.file),
    )
    return Table.of("failures", "Without a full result", failures, columns)


def environment_table(runs: Sequence[Run]) -> Table:
    """Where the runs ran: a column for each set of devices and versions."""
    where = attrgetter(*_ENVIRONMENT)
    alike = grouped(runs, lambda run: where(run.last)).values()
    environments = [_environment(runs_there) for runs_there in alike]
    columns = [Column("", text=True, of=str)]
    for number, environment in enumerate(environments, 1):
        heading = str(number) if len(environments) > 1 else ""
        columns.append(Column(heading, text=True, of=environment.get))
    # The names of the lines that are known of some environment, in order and each once.
    names = [name for environment in environments for name, text in environment.items() if text]
    return Table.of("environment", "Environment", dict.fromkeys(names), columns)


def files_table(files: Mapping[Path, int]) -> Table:
    """Files that were read."""
    columns = (Column("file", text=True), Column("rows"))
    rows = tuple(map(TableRow, files.items()))
    return Table("files", "Files read", columns, rows, in_full=True)


def _pair(run: Run) -> str | None:
    return name_of(run.last).label() if run.last.model else None


def _environment(runs: Sequence[Run]) -> dict[str, str]:
    """The lines of one environment; empty text for what is unknown."""
    values: dict[str, list[object]] = {}
    for run in runs:
        for name, value in _facts(run).items():
            values.setdefault(name, []).append(value)
    lines = {name: _listed(values_of_line) for name, values_of_line in values.items()}
    lines["when"] = _days(runs)
    lines["measurements"] = str(len(runs))
    return lines


def _days(runs: Sequence[Run]) -> str:
    """The first and the last day, `2026-11-20 to 2026-11-21`; empty if none is known."""
    days = {run.last.timestamp[:10] for run in runs if run.last.timestamp}
    if not days:
        return ""
    first = min(days)
    last = max(days)
    return first if first == last else f"{first} to {last}"


def _facts(run: Run) -> dict[str, object]:
    """The environment of one run, line by line."""
    row = run.last
    recorded = _recorded_environment(run.directory)
    memory = recorded.get("total_memory_bytes")
    machine: dict[str, object] = {
        "host": recorded.get("hostname"),
        "platform": recorded.get("platform"),
        "cores": recorded.get("num_cores"),
        "threads": row.num_threads,
        "memory GB": f"{memory / 1e9:.0f}" if isinstance(memory, int) else None,
        "Python": recorded.get("python"),
    }
    if is_elsewhere(row.engine):
        # The machine that asked, which may not be the one that answered.
        machine = {f"client's {name}": value for name, value in machine.items()}
    facts = {"devices": row.devices, "server": row.server, **machine}
    for name in _VERSIONS:
        facts[name.removesuffix("_version")] = getattr(row, name)
    facts["commit"] = short_commit(row.commit) if row.commit else None
    return facts


def _recorded_environment(directory: Path | None) -> Mapping[str, Any]:
    """The `environment.json` of a run's directory; empty where it is missing or damaged."""
    if directory is None:
        return {}
    try:
        recorded = json.loads((directory / "environment.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return recorded if isinstance(recorded, dict) else {}


def _listed(values: Iterable[object]) -> str:
    """Different values, the first three of them."""
    known = [str(value) for value in values if value not in (None, "")]
    distinct = list(dict.fromkeys(known))
    listed = ", ".join(distinct[:_MOST_LISTED])
    num_more = len(distinct) - _MOST_LISTED
    return f"{listed} and {num_more} more" if num_more > 0 else listed
