"""`repeats=2` through the command line: rounds of new processes, and a row that pools them."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from harness.cli.manifest import Manifest
from harness.cli.sweep import pool
from harness.cli.typed import read
from harness.config.command_line import Words
from harness.config.errors import SettingError
from harness.measuring.rows import LatencyRow
from harness.results.files import read_rows
from in_process import Harness, covered, results
from report_files import latency_run
from wording import mentions

QUICK = [
    "latency",
    "engine=simulated",
    "num_prompts=8",
    "decoding.max_new_tokens=4",
    "num_warmup=0",
]


def test_rounds_vary_slowest() -> None:
    typed = ["repeat=1,2,3", "model=7B", "repeats=3"]
    assert read(Words(typed[1:]), "latency").settings == typed
    assert read(Words(["repeats=1"]), "latency").settings == ["repeats=1"]
    with pytest.raises(SettingError):
        read(Words(["repeats=3"]), "eval")


def test_only_rounds_of_the_same_job_are_pooled(tmp_path: Path) -> None:
    """Also where the sweep was interrupted: after two of three rounds here, of two jobs each."""
    choices = {"repeat": ["1", "2", "3"], "draft": ["lookup", "tiny_draft"]}
    manifest = Manifest(choices)
    rows = []
    for number, draft in enumerate(["lookup", "tiny_draft", "lookup", "tiny_draft"]):
        columns = {"job": str(number), "draft": draft, "repeats": 3, "repeat": 1 + number // 2}
        rows += [dataclasses.replace(row, **columns) for row in latency_run(run=str(number))]
    pooled = pool(manifest, rows)
    assert [rows_of_job[-1].draft for rows_of_job in pooled] == ["lookup", "tiny_draft"]
    assert [rows_of_job[-1].pooled_runs for rows_of_job in pooled] == [["0", "2"], ["1", "3"]]


@pytest.mark.slow
def test_every_job_runs_once_before_any_runs_again(harness: Harness) -> None:
    asked = [*QUICK, "-m", "K=1,2", "repeats=2", "hydra.sweep.dir=sweep"]
    ended = harness(*asked)
    lines = [line for line in ended.stderr.splitlines() if line.startswith("[")]
    assert len(lines) == 4
    for line, repeat, k in zip(lines, (1, 1, 2, 2), (1, 2, 1, 2), strict=True):
        assert f"repeat={repeat} K={k}" in line
    rows = results()
    rows = rows[rows["arm"] == "speculative"]
    pooled = rows[rows["repeat"] == "all"]
    assert sorted(map(int, pooled["num_draft_tokens"])) == [1, 2]
    for covers in pooled["speedup_covers"]:
        assert covered(covers).startswith("8 prompts and 2 runs with a seed each")
    single = rows[rows["repeat"] != "all"]
    assert sorted(single["seed"]) == [0, 0, 1, 1]
    # A report shows the pooled rows in place of their runs.
    report = harness("report", "results").stdout
    # Where the machine was busy, only the verdicts are said.
    assert mentions(report, "8 prompts and 2 runs") or "faster than regular decoding in" in report
    shown = [line for line in report.splitlines() if re.match(r" +\d +\d\.\d\d×", line)]
    assert len(shown) == 2
    # The same again, in the same directory, which has the pooled rows already.
    again = harness(*asked)
    assert again.stderr.count("measured before") == 4
    assert "4 of 4 jobs" in again.stderr
    rows_of_sweep = read_rows("sweep/latency.csv", LatencyRow)
    assert len([row for row in rows_of_sweep if row.repeat == "all"]) == 2 * 2
    assert list(results()["repeat"]).count("all") == 2 * 2


@pytest.mark.slow
def test_runs_that_were_measured_before_are_pooled_with_new_ones(harness: Harness) -> None:
    """What every run advises: more repeats than before, and fewer."""
    quick = [*QUICK, "K=2"]
    harness(*quick)
    for repeats, before in ((3, 1), (2, 2)):
        ended = harness(*quick, f"repeats={repeats}")
        assert ended.stderr.count("measured before") == before
        assert mentions(ended.stdout, f"8 prompts and {repeats} runs")
    # Without the times of its prompts a run cannot be in an interval over runs.
    for file in Path("outputs").rglob("latency_prompts.csv"):
        file.unlink()
    ended = harness(*quick, "repeats=2")
    assert ended.stderr.count("measured before") == 1
    assert mentions(ended.stdout, "8 prompts and 2 runs")
