from __future__ import annotations

import time

from harness.engines.stopwatches import Phases


class Runner:
    name = "runner"

    def extend(self, seconds: float) -> int:
        time.sleep(seconds)
        return 7


def test_a_phase_averages_the_calls_of_one_method() -> None:
    phases = Phases()
    runner = phases.watch("forward", Runner(), "extend")
    assert phases.mean_ms("forward") is None
    assert runner.extend(0) == 7
    runner.extend(0.02)
    assert (runner.name, phases.calls["forward"]) == ("runner", 2)
    assert phases.mean_ms("forward") is not None
    assert phases.mean_ms("forward") >= 10
    assert phases.mean_ms("drafting") is None
