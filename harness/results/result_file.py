"""`result.json` in the directory of every run: its rows with nested intervals, verdict, environment and
command, for programs. `result.schema.json` beside this file describes it.

A change that a reader of version 1 could not read gets another version. Columns may be added.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from harness.results.environment import environment
from harness.results.files import Contents
from harness.results.locked_files import replace_file
from harness.results.row import ColumnDescription, Row
from harness.results.schema import ComparedRow, RunRow
from harness.results.statistics.interval import Interval
from harness.results.verdict import verdict_of

NAME = "result.json"
SCHEMA = Path(__file__).with_name("result.schema.json")
VERSION = 1


def write_result(
    directory: Path,
    rows: Sequence[RunRow],
    devices: Sequence[str],
    finding: Sequence[str] = (),
    doubts: Sequence[str] = (),
) -> None:
    """Write the file of a run, whole or not at all; a run without rows leaves none.

    Args:
        rows: all rows of the run, the one that is judged last.
        devices: product names of the devices that computed.
        finding, doubts: sentences of the run's page.
    """
    if not rows:
        return
    last = rows[-1]
    verdict: dict[str, Any] | None = None
    if isinstance(last, ComparedRow) and getattr(last, "arm", "speculative") == "speculative":
        judged = verdict_of(last)
        verdict = {
            "conclusion": judged.conclusion,
            "reason": judged.reason or None,
            "speedup": _as_json(judged.speedup),
        }
    content = {
        "version": VERSION,
        "command": last.kind,
        "run": last.run,
        "status": last.status,
        "error": last.error,
        "verdict": verdict,
        "finding": [*finding],
        "doubts": [*doubts],
        "environment": environment(devices),
        "rows": [
            {field.name: _as_json(getattr(row, field.name)) for field in fields(row)}
            for row in rows
        ],
    }
    replace_file(directory / NAME, f"{json.dumps(content, indent=1)}\n".encode())


def read_result(file: Path, kinds: Collection[type[Row]]) -> Contents | None:
    """The rows of a `result.json` whose command has one of these kinds of row; None for any other JSON file.

    A value that cannot be read is None, as in a damaged CSV file.

    Raises:
        OSError: when it cannot be read.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8", errors="replace"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(content, Mapping) or not isinstance(content.get("rows"), list):
        return None
    kind = next((kind for kind in kinds if kind.kind == content.get("command")), None)
    if kind is None:
        return None
    if content.get("version") != VERSION:
        note = f"{file} has version {content.get('version')}, and {VERSION} can be read; left out"
        return Contents(kind, [], [note])
    columns = kind.columns()
    rows = []
    for row in content["rows"]:
        if isinstance(row, Mapping):
            rows.append(kind.parse({name: _cell(row, columns[name]) for name in columns}))
    torn = [f"{file}: a row is no object; left out"] * (len(content["rows"]) - len(rows))
    return Contents(kind, [*rows], torn)


def _as_json(value: Any) -> Any:
    if isinstance(value, Interval):
        parts = value.parts()
        return parts | {"covers": parts["covers"] or ""}
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): _as_json(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(part) for part in value]
    return value


def _cell(row: Mapping[str, Any], column: ColumnDescription) -> str:
    """A column of a row as the cell of a CSV file; of an interval, or of a list of them, its part."""
    value = row.get(column.field)
    if column.part:
        intervals = value if isinstance(value, list) else [value]
        parts = [
            interval.get(column.part) if isinstance(interval, Mapping) else None
            for interval in intervals
        ]
        value = parts if isinstance(value, list) else parts[0]
        # A list lacks its ends where one of them is not known.
        if None in parts:
            value = None
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value)
