from __future__ import annotations

import time

from harness.engines.stopwatches import Stopwatch


def test_a_stopwatch_averages_calls() -> None:
    watch = Stopwatch(lambda: None)
    assert watch.mean_ms is None
    assert watch(lambda: 7) == 7
    watch(lambda: time.sleep(0.02))
    assert watch.calls == 2
    assert watch.mean_ms is not None
    assert watch.mean_ms >= 10
