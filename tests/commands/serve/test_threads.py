"""The number of threads follows what other programs leave free."""

from __future__ import annotations

import psutil
import pytest
import torch

from harness.commands.serve import threads
from harness.commands.serve.threads import ThreadChoice


@pytest.fixture
def applied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of threads that are set, on a machine of 4 cores."""
    numbers = [4]
    monkeypatch.setattr(torch, "set_num_threads", numbers.append)
    monkeypatch.setattr(threads.os, "cpu_count", lambda: 4)
    return numbers


def test_threads_follow_the_free_cores(applied: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """On 4 cores: used by others, used by this process, threads then."""
    steps = [(0, 0, 4), (0, 4, 4), (1, 3, 3), (3, 1, 1), (4, 0.5, 1), (6, 0.1, 1), (1.6, 1, 2), (0, 1, 4)]  # fmt: skip
    used = {"machine": 0.0, "own": 0.0}
    monkeypatch.setattr(psutil, "cpu_percent", lambda: 100 * used["machine"] / 4)
    monkeypatch.setattr(psutil.Process, "cpu_percent", lambda process: 100 * used["own"])
    monkeypatch.setattr(threads, "_PERIOD_S", 0.0)
    lines: list[str] = []
    choice = ThreadChoice(lines.append, most=4)
    for others, own, expected in steps:
        used.update(machine=others + own, own=own)
        choice.choose_if_due()
        assert applied[-1] == expected
    [line] = lines
    assert line.startswith("Other programs use 1.0 of 4 cores")
    assert "3 of 4 threads" in line


def test_a_choice_holds_for_a_while(applied: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_PERIOD_S", 1e9)
    choice = ThreadChoice(print, most=4)
    monkeypatch.setattr(psutil, "cpu_percent", lambda: pytest.fail("nothing is read"))
    choice.choose_if_due()
    assert applied == [4]
