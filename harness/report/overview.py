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
    rows = [run.last for run in runs]
    days = sorted({row.timestamp[:10] for row in rows if row.timestamp})
    versions = {
        name.removesuffix("_version"): _listed(getattr(row, name) for row in rows)
        for name in _VERSIONS
    }
    machine = _machine(runs)
    if all(is_elsewhere(row.engine) for row in rows):
        # The machine that asked, which may not be the one that answered.
        machine = {f"client's {name}": text for name, text in machine.items()}
    return {
        "devices": _listed(row.devices for row in rows),
        "server": _listed(row.server for row in rows),
        **machine,
        **versions,
        "commit": _listed(short_commit(row.commit) for row in rows if row.commit),
        "when": " to ".join(dict.fromkeys((days[0], days[-1]))) if days else "",
        "measurements": str(len(runs)),
    }


def _machine(runs: Sequence[Run]) -> dict[str, str]:
    directories = dict.fromkeys(run.directory for run in runs if run.directory)
    recorded = [_recorded_environment(directory) for directory in directories]
    memory = [entry.get("total_memory_bytes") for entry in recorded]
    return {
        "host": _listed(entry.get("hostname") for entry in recorded),
        "platform": _listed(entry.get("platform") for entry in recorded),
        "cores": _listed(entry.get("num_cores") for entry in recorded),
        "threads": _listed(run.last.num_threads for run in runs),
        "memory GB": _listed(f"{size / 1e9:.0f}" for size in memory if isinstance(size, int)),
        "Python": _listed(entry.get("python") for entry in recorded),
    }


def _recorded_environment(directory: Path) -> Mapping[str, Any]:
    """The `environment.json` of a run's directory; empty where it is missing or damaged."""
    try:
        recorded = json.loads((directory / "environment.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return recorded if isinstance(recorded, dict) else {}


def _listed(values: Iterable[object]) -> str:
    """Different values, the first three of them."""
    distinct = [str(value) for value in dict.fromkeys(values) if value not in (None, "")]
    more = f" and {len(distinct) - 3} more" if len(distinct) > 3 else ""
    return ", ".join(distinct[:3]) + more
