"""Which worker a job of a sweep gets, and how that is ended."""

from __future__ import annotations

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
