"""The rows of a sweep's jobs in its own file."""

from __future__ import annotations

from pathlib import Path

from harness.cli.manifest import SweepFile
from harness.measuring.rows import LatencyRow
from harness.results.files import append_rows, read_rows


def test_rows_take_the_place_of_those_of_the_same_job(tmp_path: Path) -> None:
    SweepFile(tmp_path, LatencyRow).put(0, [LatencyRow(model='a "quoted"\nline', num_tokens=1)])
    two = [LatencyRow(model="NA"), LatencyRow(model="x", num_tokens=2)]
    assert len(SweepFile(tmp_path, LatencyRow).put(1, two)) == 3
    rows = SweepFile(tmp_path, LatencyRow).put(
        0, [LatencyRow(model="new", num_tokens=3, ignore_eos=True)]
    )
    assert [(row.job, row.model) for row in rows] == [("1", "NA"), ("1", "x"), ("0", "new")]
    assert read_rows(tmp_path / "latency.csv", LatencyRow) == rows


def test_a_job_without_rows_removes_none(tmp_path: Path) -> None:
    assert SweepFile(tmp_path, LatencyRow).put(0, []) == []
    SweepFile(tmp_path, LatencyRow).put(1, [LatencyRow(model="7B")])
    assert len(SweepFile(tmp_path, LatencyRow).put(0, [])) == 1


def test_rows_of_an_earlier_sweep_go_and_those_of_single_runs_stay(tmp_path: Path) -> None:
    file = tmp_path / "latency.csv"
    append_rows(file, [LatencyRow(model="single")])
    SweepFile(tmp_path, LatencyRow).put(0, [LatencyRow(model="repeated", repeat=1)])
    append_rows(file, [LatencyRow(model="pooled", repeat="all")])
    SweepFile(tmp_path, LatencyRow).remove_jobs()
    assert [row.model for row in read_rows(file, LatencyRow)] == ["single"]
    # A single run is no job of this sweep.
    assert len(SweepFile(tmp_path, LatencyRow).put(0, [LatencyRow(model="7B")])) == 1
    assert [row.model for row in SweepFile(tmp_path, LatencyRow).job_rows()] == ["7B"]
    assert len(read_rows(file, LatencyRow)) == 2
