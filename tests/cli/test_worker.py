"""Which worker a job of a sweep gets, and the rows of all jobs in the sweep's file."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.cli import sweep
from harness.cli.manifest import SweepFile
from harness.commands.latency.record import LatencySettings
from harness.config.errors import HarnessError, RunError
from harness.measuring.rows import LatencyRow
from harness.results.files import append_rows, read_rows
from some_settings import settings_of


class SlowLoader:
    """A worker that needs 100 s to load a pair."""

    def __init__(self) -> None:
        self.loading = False

    def run(self, job: Any, timeout_s: float | None) -> HarnessError | None:
        self.loading = timeout_s is not None and timeout_s < 100
        return RunError(f"no end after {timeout_s} s") if self.loading else None

    def close(self) -> None:
        pass


@pytest.fixture
def crew(monkeypatch: pytest.MonkeyPatch) -> sweep.Crew:
    monkeypatch.setattr(sweep, "Worker", SlowLoader)
    return sweep.Crew()


def test_a_pair_that_loads_too_slowly_is_tried_again_with_more_time(crew: sweep.Crew) -> None:
    errors = []
    for timeout_s in (10.0, 10.0, 600.0):
        job: Any = SimpleNamespace(settings=settings_of(LatencySettings, job_timeout_s=timeout_s))
        errors.append(crew.run(job))
    assert list(map(str, errors)) == [
        "no end after 10.0 s",
        "not tried, because the pair failed to load before: no end after 10.0 s",
        "None",
    ]


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
