"""The sweep's side of its worker processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing.connection import Connection

import pytest

from forked import Forked
from harness.cli import worker
from harness.config.errors import RunError


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
