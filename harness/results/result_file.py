"""Writes `result.json`, for programs, into the directory of every run that has rows: the rows with nested intervals,
the sentences of the run's page, its environment and its command.

`result.schema.json`, next to this file, describes the format. `VERSION` is raised if programs that read the current
version could not read the new files. Adding columns is no such change.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from pydantic_core import to_jsonable_python

from harness.results.drafts import as_printed
from harness.results.environment import environment
from harness.results.judging.statement import Statement
from harness.results.locked_files import replace_file
from harness.results.schema import RunRow
from harness.results.statistics.interval import Interval

NAME = "result.json"
SCHEMA = Path(__file__).with_name("result.schema.json")
VERSION = 2


def write_result(
    directory: Path,
    rows: Sequence[RunRow],
    devices: Sequence[str],
    finding: Sequence[str] = (),
    doubts: Sequence[str] = (),
    statements: Sequence[Statement] = (),
) -> None:
    """Write the `result.json` of a run, in one step. For a run without rows, nothing is written.

    Args:
        rows: all rows of the run.
        devices: product names of the devices that computed.
        finding, doubts: sentences of the run's page.
        statements: the statements from which the finding follows.

    Raises:
        SettingError, RunError: the file cannot be written, as from `replace_file`.
    """
    if not rows:
        return
    last = rows[-1]
    content = {
        "version": VERSION,
        "command": last.kind,
        "run": last.run,
        "status": last.status,
        "error": last.error,
        "finding": [*finding],
        "doubts": [*doubts],
        "statements": [statement.as_json() for statement in statements],
        "environment": environment(devices),
        "rows": [
            {
                name: value.parts() if isinstance(value, Interval) else value
                for name, value in vars(row).items()
            }
            | {"as_printed": as_printed(row)}
            for row in rows
        ],
    }
    # A number that is not finite is null.
    finite = to_jsonable_python(content, inf_nan_mode="null")
    replace_file(directory / NAME, f"{json.dumps(finite, indent=1)}\n".encode())
