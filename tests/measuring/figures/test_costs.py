"""The price of an iteration and the speed-up that follows from it, of answers whose times are written here."""

from __future__ import annotations

from collections import Counter, defaultdict
from types import SimpleNamespace
from typing import Any

import pytest

from harness.engines.protocol import Answered, BatchTimes, Phases
from harness.engines.requests import RequestRecord
from harness.measuring.figures.costs import CostFigures
from measured_runs import run_of


def answered(num_accepted: int, seconds: float) -> Answered:
    """Ten iterations behind a prompt that takes 0.1 s."""
    request = RequestRecord(0, 1, [0.1], seconds, outcomes=[(4, num_accepted)] * 10)
    request.num_tokens = 1 + 10 * (num_accepted + 1)
    return Answered(requests=[request], seconds=seconds, batch=BatchTimes(0.1, 1, 10))


def test_a_prediction_is_tokens_over_the_measured_cost() -> None:
    """Steps of 10 ms; iterations that draft for 4 ms, verify for 12 and yield 2 tokens: 2 · 10 / 16."""
    roofs = [SimpleNamespace(step_bytes=number, floor_ms=float(number)) for number in (7, 3)]
    run = run_of([answered(0, 0.2)], [answered(1, 0.27)], roofs=roofs)
    regular, speculative = run.arms.values()
    regular.phases.add(Phases(defaultdict(float, forward=0.1), Counter(forward=10)))
    speculative.phases.add(Phases(defaultdict(float, forward=0.12), Counter(forward=10)))
    costs: Any = CostFigures.measured(run, speculative)
    assert costs.predicted_speedup is None, "drafting is unknown"
    speculative.phases.add(Phases(defaultdict(float, drafting=0.04), Counter(drafting=10)))
    costs = CostFigures.measured(run, speculative)
    assert (costs.draft_ms, costs.verify_ms, costs.target_step_ms) == (4.0, 12.0, None)
    assert costs.iteration_ms == pytest.approx(17.0)
    assert costs.predicted_speedup == pytest.approx(2 * 10 / 16)
    assert (costs.step_bytes, costs.draft_floor_ms) == (7, 3.0)
    costs = CostFigures.measured(run, regular)
    assert (costs.target_step_ms, costs.predicted_speedup) == (10.0, None)
    assert (costs.step_bytes, costs.draft_floor_ms) == (7, None)
