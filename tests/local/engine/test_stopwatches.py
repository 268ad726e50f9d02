from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.engines.phases import Phases
from harness.local.engine import stopwatches
from harness.local.engine.stopwatches import PhaseTimer, pass_ms, pass_widths


class Runner:
    name = "runner"

    def extend(self, seconds: float) -> int:
        time.sleep(seconds)
        return 7


def test_a_phase_averages_the_calls_of_one_method() -> None:
    timer = PhaseTimer()
    phases = timer.phases
    runner = timer.watch("forward", Runner(), "extend")
    assert phases.mean_ms("forward") is None
    assert runner.extend(0) == 7
    runner.extend(0.02)
    assert (runner.name, phases.calls["forward"]) == ("runner", 2)
    assert phases.mean_ms("forward") is not None
    assert phases.mean_ms("forward") >= 10
    assert phases.mean_ms("drafting") is None


def test_an_iteration_that_failed_while_verifying_has_no_mean() -> None:
    timer = PhaseTimer()
    phases = timer.phases
    timer.watch("drafting", Runner(), "extend").extend(0)
    assert phases.mean_ms("drafting") is None


def test_phases_of_several_answers_add_up() -> None:
    one = Phases(calls=Counter(forward=2))
    one.seconds["forward"] = 3.0
    total = Phases()
    for _ in range(2):
        total.add(one)
    assert (total.calls["forward"], total.mean_ms("forward")) == (4, 1500)
    assert one.calls["forward"] == 2


@pytest.mark.parametrize(
    ("number", "widths"), [(1, [1, 2]), (2, [1, 2, 3]), (4, [1, 2, 3, 5]), (6, [1, 2, 3, 5, 7])]
)
def test_widths_end_with_the_verification(number: int, widths: list[int]) -> None:
    assert pass_widths(number) == widths


class Slow:
    """A runner whose pass over n tokens takes n² seconds, the first of each width ten times as long."""

    def __init__(self) -> None:
        self.now = 0.0
        self.seen: set[int] = set()
        self.extended = 0

    def start(self, prompts: Sequence[Sequence[int]]) -> Any:
        return SimpleNamespace(logits=torch.zeros(len(prompts), 3))

    def extend(self, tokens: torch.Tensor) -> None:
        width = tokens.shape[1]
        self.now += width**2 * (1 if width in self.seen else 10)
        self.seen.add(width)
        self.extended += width

    def keep(self, counts: Sequence[int]) -> None:
        assert set(counts) == {0}


def test_passes_are_timed_by_their_width(monkeypatch: pytest.MonkeyPatch) -> None:
    runner: Any = Slow()
    monkeypatch.setattr(stopwatches.time, "perf_counter", lambda: runner.now)
    assert pass_ms(runner, [[1, 2], [3]], [1, 2, 4], ()) == [1000, 4000, None, 16000]
