"""Rows of every kind that the schema knows go through a sweep's tables and `report`'s, whatever they hold."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from harness.cli.tables import exit_code, job_line, print_sweep
from harness.commands.command import Command
from harness.commands.plan.rows import PlanRow
from harness.commands.registry import commands
from harness.commands.report.command import build, write
from harness.config.errors import SettingError
from harness.results.files import write_rows
from harness.results.schema import RunRow
from report_files import latency_run

VALUES: dict[type, Any] = {
    str: "text", int: 3, float: 0.5, bool: True, list: [1, 2], dict: {"cpu": 5},
}  # fmt: skip
WITH_ROWS = [command for command in commands() if isinstance(command, Command)]
RUN_KINDS = [command.row for command in WITH_ROWS]
SWEPT = [command.row for command in WITH_ROWS if command.sweeps]
ARMS = ("regular", "speculative")


def filled(kind: type[RunRow], **changes: Any) -> RunRow:
    """A row that has a value in every column."""
    values = {name: VALUES[column.type] for name, column in kind.columns().items()}
    known = {name: value for name, value in changes.items() if name in values}
    return kind.from_values(values | {"status": "ok", "job": "0"} | known)


def runs(kind: type[RunRow]) -> dict[str, list[RunRow]]:
    """Runs by what they are an example of."""
    return {
        "filled": [filled(kind, arm=arm, run="1") for arm in ARMS],
        "bare": [kind(run="2", job="1", status="ok")],
        "failed": [kind(run="3", job="2", status="failed", error="killed")],
        "in part": [filled(kind, run="4", job="3", arm="regular", status="interrupted")],
    }


@pytest.mark.parametrize("kind", SWEPT)
@pytest.mark.parametrize("example", ["filled", "bare", "failed", "in part"])
def test_a_job_has_a_line(kind: type[RunRow], example: str) -> None:
    rows = runs(kind)[example]
    assert job_line(kind.kind, rows)
    assert exit_code(kind.kind, rows) in (0, 1, 3)


@pytest.mark.parametrize("kind", SWEPT)
def test_a_sweep_has_tables(
    kind: type[RunRow], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [row for run in runs(kind).values() for row in run]
    print_sweep(kind.kind, rows, tmp_path / "rows.csv", 4)
    printed = capsys.readouterr().out
    assert "text" in printed
    assert "killed" in printed


def test_a_sweep_of_more_jobs_than_a_page_has_room_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The column of a name that all jobs share is left out of the first rows, too."""
    rows = [row for seed in range(22) for row in latency_run(seed=seed, job=str(seed))]
    print_sweep("latency", rows, tmp_path / "latency.csv", 22)
    printed = capsys.readouterr().out
    assert "2 more" in printed
    assert re.search(r"^ +settings +K ", printed, re.MULTILINE)


@pytest.mark.parametrize("kind", RUN_KINDS)
def test_report_shows_it(kind: type[RunRow], tmp_path: Path) -> None:
    rows = [row for run in runs(kind).values() for row in run]
    file = tmp_path / f"{kind.kind}.csv"
    write_rows(file, rows)
    if kind is PlanRow:
        # It measures nothing.
        with pytest.raises(SettingError, match="is no CSV file of"):
            build([file])
        return
    report = build([file])
    assert report.pages
    write(report, tmp_path)
    assert "text" in (tmp_path / "report.md").read_text()
