"""About the runs of a report: failures, where they ran, and which files were read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from harness.report.runs import Run
from harness.report.table import Column, Table, TableRow, grouped
from harness.report.words import Name, pair_name, short_commit

_VERSIONS = ("harness_version", "torch_version", "transformers_version", "bitsandbytes_version")


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
    """Where the runs ran, a column for each set of devices and versions."""
    where = attrgetter(
        *(f"last.{name}" for name in ("devices", "server", "num_threads", *_VERSIONS))
    )
    described = [_place(there) for there in grouped(runs, where).values()]
    headings = map(str, range(1, len(described) + 1)) if len(described) > 1 else [""]
    columns = [
        Column(heading, text=True, of=place.get)
        for heading, place in zip(headings, described, strict=False)
    ]
    told = [name for place in described for name, text in place.items() if text]
    names = list(dict.fromkeys(told))
    return Table.of("environment", "Environment", names, [Column("", text=True, of=str), *columns])


def files_table(files: Mapping[Path, int]) -> Table:
    """What was read."""
    columns = (Column("file", text=True), Column("rows"))
    return Table("files", "Files read", columns, tuple(map(TableRow, files.items())), in_full=True)


def _pair(run: Run) -> str | None:
    k = run.last.num_draft_tokens if run.last.draft else None
    return Name(pair_name(run.last), k).label() if run.last.model else None


def _place(runs: Sequence[Run]) -> dict[str, str]:
    described = [
        _environment(directory)
        for directory in dict.fromkeys(run.directory for run in runs)
        if directory
    ]
    rows = [run.last for run in runs]
    days = sorted({row.timestamp[:10] for row in rows if row.timestamp})
    memory = [entry.get("total_memory_bytes") for entry in described]
    machine = {
        "host": _listed(entry.get("hostname") for entry in described),
        "platform": _listed(entry.get("platform") for entry in described),
        "cores": _listed(entry.get("num_cores") for entry in described),
        "threads": _listed(row.num_threads for row in rows),
        "memory GB": _listed(f"{size / 1e9:.0f}" for size in memory if isinstance(size, int)),
        "Python": _listed(entry.get("python") for entry in described),
    }
    if all(row.engine == "server" for row in rows):
        # The machine that asked, which is not known to be the one that answered.
        machine = {f"client's {name}": text for name, text in machine.items()}
    return {
        "devices": _listed(row.devices for row in rows),
        "server": _listed(row.server for row in rows),
        **machine,
        **{
            name.removesuffix("_version"): _listed(getattr(row, name) for row in rows)
            for name in _VERSIONS
        },
        "commit": _listed(short_commit(row.commit) for row in rows if row.commit),
        "when": " to ".join(dict.fromkeys((days[0], days[-1]))) if days else "",
        "measurements": str(len(runs)),
    }


def _environment(directory: Path) -> Mapping[str, Any]:
    try:
        described = json.loads((directory / "environment.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return described if isinstance(described, dict) else {}


def _listed(values: Iterable[object]) -> str:
    """Different values, the first three of them."""
    distinct = [str(value) for value in dict.fromkeys(values) if value not in (None, "")]
    more = f" and {len(distinct) - 3} more" if len(distinct) > 3 else ""
    return ", ".join(distinct[:3]) + more
