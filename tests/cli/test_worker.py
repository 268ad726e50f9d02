"""A sweep's workers: which one a job gets, how they end, and the rows of all jobs in the sweep's file."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from forked import Forked
from harness.cli import jobs, worker
from harness.cli.manifest import SweepFile
from harness.commands.latency.record import LatencySettings
from harness.config.errors import HarnessError, RunError
from harness.measuring.rows import LatencyRow
from harness.results.files import append_rows, read_rows
from some_settings import settings_of


def take_job(number: int, fate: Callable[[], None]) -> None:
    connection = Connection(number)
    connection.recv()
    fate()


def error_of_worker(monkeypatch: pytest.MonkeyPatch, fate: Callable[[], None]) -> str:
    """The error of a job in whose process this happens."""

    def start(connection: Connection, environment: Mapping[str, str]) -> Forked:
        number = connection.fileno()
        return Forked(partial(take_job, number, fate), environment=environment, kept=[number])

    monkeypatch.setattr(worker, "start_process", start)
    started = worker.Worker()
    try:
        error = started.run(("any", "job"))  # type: ignore[arg-type]
    finally:
        started.close()
    assert isinstance(error, RunError)
    assert started.has_ended
    return str(error)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_the_death_of_a_process_is_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "its process was killed by SIGKILL" in error_of_worker(monkeypatch, die)


def close_files() -> None:
    os.closerange(3, 100)
    time.sleep(3600)


def test_a_process_that_lives_on_without_its_connection_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A library may close file descriptors that are not its own."""
    monkeypatch.setattr(worker, "_ENDING_S", 0.1)
    assert "closed its connection" in error_of_worker(monkeypatch, close_files)


class SomeJob:
    """A job whose process writes no rows."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings_of(LatencySettings, **settings)


class SlowLoader:
    """A worker that needs 100 s to load a pair."""

    def __init__(self) -> None:
        self.loading = False
        self.has_ended = False

    def run(self, job: SomeJob, timeout_s: float | None) -> HarnessError | None:
        self.loading = timeout_s is not None and timeout_s < 100
        return RunError(f"no end after {timeout_s} s") if self.loading else None

    def close(self) -> None:
        pass


@pytest.fixture
def crew(monkeypatch: pytest.MonkeyPatch) -> jobs.Crew:
    monkeypatch.setattr(jobs, "Worker", SlowLoader)
    return jobs.Crew()


def test_a_pair_that_loads_too_slowly_is_tried_again_with_more_time(crew: jobs.Crew) -> None:
    errors = []
    for timeout_s in (10.0, 10.0, 600.0):
        job: Any = SomeJob(job_timeout_s=timeout_s)
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
