"""The number of threads follows what other programs leave free."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from harness.commands.serve import threads
from harness.commands.serve.threads import ThreadChoice, Usage, read_usage

# A choice of threads over these readings of the machine's use, and the numbers that it sets.
Choose = Callable[[Sequence[Usage], Callable[[str], None]], tuple[ThreadChoice, list[int]]]


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Choose:
    """On a machine of 4 cores."""

    def make(
        readings: Sequence[Usage], say: Callable[[str], None]
    ) -> tuple[ThreadChoice, list[int]]:
        applied = [4]
        monkeypatch.setattr(threads, "read_usage", iter(readings).__next__)
        monkeypatch.setattr(torch, "set_num_threads", applied.append)
        monkeypatch.setattr(threads.os, "cpu_count", lambda: 4)
        return ThreadChoice(say, most=4), applied

    return make


def test_threads_follow_the_free_cores(choose: Choose, monkeypatch: pytest.MonkeyPatch) -> None:
    """On 4 cores, in steps of 10 seconds: used by others, used by this process, threads then."""
    steps = [(0, 0, 4), (0, 4, 4), (1, 3, 3), (3, 1, 1), (4, 0.5, 1), (6, 0.1, 1), (1.6, 1, 2), (0, 1, 4)]  # fmt: skip
    readings = [Usage(0.0, 100.0, 7.0)]
    for others, own, _ in steps:
        clock, machine, used = readings[-1]
        readings.append(Usage(clock + 10, machine + 10 * (others + own), used + 10 * own))
    lines: list[str] = []
    monkeypatch.setattr(threads, "_PERIOD_S", 0.0)
    choice, applied = choose(readings, lines.append)
    for _, _, expected in steps:
        choice.choose_if_due()
        assert applied[-1] == expected
    [line] = lines
    assert line.startswith("Other programs use 1.0 of 4 cores")
    assert "3 of 4 threads" in line


def test_a_choice_holds_for_a_while(choose: Choose, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_PERIOD_S", 1e9)
    choice, applied = choose([Usage(0.0, 0.0, 0.0), Usage(1.0, 4.0, 0.0)], print)
    choice.choose_if_due()
    assert applied == [4]
    assert threads.read_usage().machine == 4.0, "nothing was read"


def test_usage_grows() -> None:
    first = read_usage()
    sum(range(10**6))
    second = read_usage()
    # The kernel corrects its count of idle time, and a difference of large numbers is rounded.
    assert all(later >= earlier - 0.1 for later, earlier in zip(second, first, strict=True))
