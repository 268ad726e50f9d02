"""Which worker a job of a sweep gets, and how that is ended."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import pytest

from harness.cli import jobs
from harness.commands.latency.record import LatencySettings
from harness.config.errors import HarnessError, RunError
from some_settings import settings_of


class SomeJob:
    """A job whose process writes no rows."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings_of(LatencySettings, **settings)


class SlowLoader:
    """A worker that needs 100 s to load a pair."""

    def __init__(self, gpus: Mapping[str, int]) -> None:
        self.gpus = list(gpus)
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
    monkeypatch.setattr(jobs, "lease", lambda number: dict.fromkeys("012"[: number or 0], 0))
    return jobs.Crew()


def worker_of(crew: jobs.Crew, **settings: Any) -> Any:
    """The worker that has run such a job."""
    job: Any = SomeJob(**settings)
    crew.run(job)
    return crew.worker


def test_a_worker_is_kept_for_jobs_with_as_many_gpus(crew: jobs.Crew) -> None:
    first = worker_of(crew, gpus_per_job=1)
    assert worker_of(crew, gpus_per_job=1) is first
    assert first.gpus == ["0"]
    assert worker_of(crew, gpus_per_job=2).gpus == ["0", "1"]
    crew.dismiss()


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


def test_a_worker_that_ends_while_idle_is_not_ended_twice(
    crew: jobs.Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sweep ends while the timer is ending the worker."""
    is_closing = threading.Event()
    may_close = threading.Event()
    num_closed = 0

    def close(worker: SlowLoader) -> None:
        nonlocal num_closed
        num_closed += 1
        if num_closed > 1:
            may_close.set()
        is_closing.set()
        assert may_close.wait()

    monkeypatch.setattr(SlowLoader, "close", close)
    monkeypatch.setattr(jobs, "_IDLE_S", 0.0)
    job: Any = SomeJob(gpus_per_job=1)
    crew.run(job)
    timer: Any = crew._idle
    join = timer.join

    def join_when_closed() -> None:
        may_close.set()
        join()

    monkeypatch.setattr(timer, "join", join_when_closed)
    assert is_closing.wait()
    crew.dismiss()
    join_when_closed()
    assert num_closed == 1
