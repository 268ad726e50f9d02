"""Tables about the runs of a report: failures, where they ran, and which files were read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.menu.records import is_elsewhere
from harness.report.names import name_of
from harness.report.runs import Run
from harness.report.table import Column, Table, TableRow, grouped
from harness.report.words import short_commit

_VERSIONS = ("harness_version", "torch_version", "transformers_version", "bitsandbytes_version")
# Runs with the same values ran in the same environment.
_ENVIRONMENT = ("devices", "server", "num_threads", *_VERSIONS)


def failures_table(failures: Sequence[Run]) -> Table:
    """Runs without a full result, with their reasons."""
    columns = (
        Column("command", text=True, of="command"),
        Column("pair", text=True, of=_pair),
        Column("status", text=True, of="status"),
        Column("reason", text=True, of="reason"),
        Column("where", text=True, of=lambda run: run.directory or run.file),
    )
    return Table.of("failures", "Failed and unfinished", failures, columns)


def environment_table(runs: Sequence[Run]) -> Table:
    """Where the runs ran: a column for each set of devices and versions."""
    alike = grouped(runs, lambda run: tuple(getattr(run.last, name) for name in _ENVIRONMENT))
    environments = [_environment(group) for group in alike.values()]
    columns = [Column("", text=True, of=str)]
    for number, environment in enumerate(environments, 1):
        heading = str(number) if len(environments) > 1 else ""
        columns.append(Column(heading, text=True, of=environment.get))
    known: dict[str, None] = {}
    for environment in environments:
        known |= dict.fromkeys(name for name, text in environment.items() if text)
    return Table.of("environment", "Environment", known, columns)


def files_table(files: Mapping[Path, int]) -> Table:
    """Files that were read."""
    columns = (Column("file", text=True), Column("rows"))
    return Table("files", "Files read", columns, tuple(map(TableRow, files.items())), in_full=True)


def _pair(run: Run) -> str | None:
    return name_of(run.last).label() if run.last.model else None


def _environment(runs: Sequence[Run]) -> dict[str, str]:
    """The lines of one environment; empty text for what is unknown."""
    facts = [_facts(run) for run in runs]
    names = dict.fromkeys(name for of_run in facts for name in of_run)
    lines = {name: _listed(of_run.get(name) for of_run in facts) for name in names}
    days = sorted({run.last.timestamp[:10] for run in runs if run.last.timestamp})
    lines["when"] = " to ".join(dict.fromkeys((days[0], days[-1]))) if days else ""
    lines["measurements"] = str(len(runs))
    return lines


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
    distinct = list(dict.fromkeys(str(value) for value in values if value not in (None, "")))
    more = f" and {len(distinct) - 3} more" if len(distinct) > 3 else ""
    return ", ".join(distinct[:3]) + more
