from __future__ import annotations

import time
from collections import Counter

import pytest
import torch
from torch import nn

from harness.engines.phases import Phases
from harness.local.engine.stopwatches import PhaseTimer


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


class Layers:
    """A phase with a layer of interest that is called twice, and another one."""

    def __init__(self, device: str) -> None:
        self.watched, self.other = (nn.Linear(8, 8, device=device) for _ in range(2))
        self.input = torch.ones(1, 8, device=device)

    def run(self) -> torch.Tensor:
        return self.watched(self.other(self.watched(self.input)))


def test_the_share_of_layers_in_a_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    timer = PhaseTimer()
    phases = timer.phases
    layers = Layers("cpu")
    ticks = iter(range(100))
    monkeypatch.setattr(
        "harness.local.engine.stopwatches.time.perf_counter", lambda: float(next(ticks))
    )
    timer.watch("plain", layers, "run").run()
    timer.watch("forward", layers, "run", [layers.watched]).run()
    assert phases.share_in_layers("plain") is None
    assert phases.share_in_layers("forward") == 2 / 5
    layers.run()
    assert next(ticks) == 8, "what runs outside the phase is not timed"


@pytest.mark.gpu
def test_on_a_gpu_the_share_comes_from_events() -> None:
    device = torch.device("cuda", 0)
    timer = PhaseTimer([device])
    phases = timer.phases
    layers = Layers("cuda")
    layers.run()
    timer.watch("forward", layers, "run", [layers.watched]).run()
    share = phases.share_in_layers("forward")
    assert share is not None
    assert 0 < share < 1
