"""The sweep's side of its worker processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest

from forked import Forked
from harness.cli import worker
from harness.config.errors import RunError


def fail(number: int, failure: Callable[[str], RunError], rank: str) -> None:
    connection = Connection(number)
    connection.recv()
    connection.send(worker._JobEnded(failure(rank), is_last=True))


def start_ranks(monkeypatch: pytest.MonkeyPatch, failure: Callable[[str], RunError]) -> None:
    """Workers start ranks that take a job and answer with `failure` of their number, if it returns."""

    def start(
        connection: Connection, environment: Mapping[str, str], locks: Sequence[int]
    ) -> Forked:
        number = connection.fileno()
        program = partial(fail, number, failure, environment["RANK"])
        return Forked(program, environment=environment, kept=[number])

    monkeypatch.setattr(worker, "start_process", start)


def hang_or_fail(rank: str) -> RunError:
    if rank == "0":
        time.sleep(3600)
    return RunError("rank 1: no memory")


def test_a_rank_that_goes_on_after_the_failure_of_another_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It waits for the other one where no signal reaches it; the job has no limit."""
    start_ranks(monkeypatch, hang_or_fail)
    monkeypatch.setattr(worker, "_RANKS_GRACE_S", 0.1)
    monkeypatch.setattr(worker, "_GRACE_S", 0.1)
    error = worker.Worker(2).run(("any", "job"))  # type: ignore[arg-type]
    assert str(error) == "rank 1: no memory"


def fail_or_die(rank: str) -> RunError:
    if rank == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return RunError("connection closed by peer")


def test_the_death_of_a_rank_explains_the_errors_of_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also on a busy machine, where both are there when the sweep looks."""

    def wait_long(*arguments: Any) -> list[Any]:
        time.sleep(1)
        return wait(*arguments)

    start_ranks(monkeypatch, fail_or_die)
    monkeypatch.setattr(worker, "wait", wait_long)
    ranks = worker.Worker(2)
    try:
        error = ranks.run(("any", "job"))  # type: ignore[arg-type]
    finally:
        ranks.close()
    assert "rank 1 was killed by SIGKILL" in str(error)


def close_files(rank: str) -> RunError:
    os.closerange(3, 100)
    time.sleep(3600)
    return RunError("never sent")


def test_a_process_that_lives_on_without_its_connection_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A library may close file descriptors that are not its own."""
    start_ranks(monkeypatch, close_files)
    monkeypatch.setattr(worker, "_RANKS_GRACE_S", 0.1)
    monkeypatch.setattr(worker, "_GRACE_S", 0.1)
    ranks = worker.Worker(2)
    try:
        error = ranks.run(("any", "job"))  # type: ignore[arg-type]
    finally:
        ranks.close()
    assert "closed its connection" in str(error)
