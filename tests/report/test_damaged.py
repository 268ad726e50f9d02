"""One damaged cell in a file does not end the report."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from harness.report.command import build, write
from report_files import eval_run, latency_run
from report_files import write as write_runs

CELLS = {
    "text": "fast",
    "negative": "-7",
    "huge": "1e300",
    "not finite": "nan",
    "deep": "[" * 100_000,
    "nested": '{"a": {"b": [1]}, "c": [[2]]}',
    "texts": '["x", null, {}]',
    "numbers": "[-1, 1e300]",
    "object": '{"cpu": "x"}',
    "empty list": "[]",
}


@pytest.mark.parametrize("damage", CELLS)
@pytest.mark.parametrize("command", ["latency", "eval"])
def test_one_damaged_column_after_another(command: str, damage: str, tmp_path: Path) -> None:
    whole = write_runs(
        tmp_path / "whole.csv",
        *([latency_run(2), latency_run(4)] if command == "latency" else [eval_run()]),
    )
    header, *lines = list(csv.reader(whole.read_text().splitlines()))
    damaged = []
    for place, name in enumerate(header):
        for cells in lines:
            changed = [*cells]
            changed[header.index("run")] += name
            if name != "run":
                changed[place] = CELLS[damage]
            damaged.append(changed)
    file = tmp_path / f"{command}.csv"
    with file.open("w", newline="") as stream:
        csv.writer(stream).writerows([header, *damaged])
    report = build([file])
    assert report.parts
    write(report, tmp_path)
