"""One damaged cell in a file does not end the report."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Mapping
from pathlib import Path

import pytest

from harness.commands.registry import row_kinds
from harness.commands.report.command import build, write
from harness.results.files import read_kind
from harness.results.row import ColumnDescription
from report_files import eval_run, latency_run
from report_files import write as write_runs

NUMBERS = {"negative": "-7", "huge": "1e300", "not finite": "nan"}
TEXTS = {
    "text": "fast",
    # More than any Python nests.
    "deep": "[" * 12_000,
    "nested": '{"a": {"b": [1]}, "c": [[2]]}',
    "texts": '["x", null, {}]',
    "numbers": "[-1, 1e300]",
    "object": '{"cpu": "x"}',
    "empty list": "[]",
}
# A report is drawn for each: what is no number does not depend on the others, and is in one.
REPORTS = {**{name: {name: cell} for name, cell in NUMBERS.items()}, "no number": TEXTS}


@pytest.mark.parametrize("report", REPORTS)
def test_one_damaged_column_after_another(report: str, tmp_path: Path) -> None:
    """Of `latency` and of `eval`, in one report."""
    latency = write_runs(tmp_path / "whole_latency.csv", latency_run(2), latency_run(4))
    whole_files = {"latency": latency, "eval": write_runs(tmp_path / "whole_eval.csv", eval_run())}
    damaged_files = []
    for command, whole in whole_files.items():
        damaged = tmp_path / f"{command}.csv"
        write_with_damage(damaged, whole, REPORTS[report])
        damaged_files.append(damaged)
    built = build(damaged_files)
    assert built.pages
    write(built, tmp_path)


def is_different(damage: str, about: ColumnDescription) -> bool:
    """Whether the damage may do something to such a column that another one does not."""
    if about.type in (list, dict) or "list" in str(about.hint):
        return damage in TEXTS
    return about.type is str or damage in NUMBERS or damage == "text"


def write_with_damage(damaged: Path, whole: Path, cells: Mapping[str, str]) -> None:
    """Write the runs of a file again for each of its columns and each of these cells in it."""
    header, *lines = list(csv.reader(whole.read_text().splitlines()))
    place_of_run = header.index("run")
    runs = [list(rows) for _, rows in itertools.groupby(lines, lambda row: row[place_of_run])]
    kind = read_kind(whole, row_kinds())
    assert kind is not None
    columns = kind.columns()
    rows = []
    for place, name in enumerate(header):
        for damage, cell in cells.items():
            if not is_different(damage, columns[name]):
                continue
            # The runs take turns: K is 2 in one and 4 in the other.
            for row in runs[place % len(runs)]:
                changed = [*row]
                changed[place_of_run] += f"{name} {damage}"
                if name != "run":
                    changed[place] = cell
                rows.append(changed)
    with damaged.open("w", newline="") as stream:
        csv.writer(stream).writerows([header, *rows])


def test_a_figure_that_is_text_is_noted(tmp_path: Path) -> None:
    file = write_runs(tmp_path / "latency.csv", latency_run(2), latency_run(4))
    file.write_text(file.read_text().replace("100.0", "fast", 1))
    notes = build([file]).notes
    assert f"{file}, line 2: ms_per_token cannot be read" in notes
