"""A change of speed is what iterations yield, or what they cost: planted, and attributed through the command."""

from __future__ import annotations

import pandas as pd

from in_process import Harness

BEFORE = ["engine=simulated", "K=4", "tokens=200"]


def measured(harness: Harness, name: str, *planted: str) -> str:
    file = f"{name}.csv"
    for seed in (1, 2):
        harness("latency", *BEFORE, *planted, f"seed={seed}", f"results.file={file}")
    rows = pd.read_csv(file, dtype=str)
    # What was planted is in `settings`, where a change of a server would not be.
    rows.assign(settings="").to_csv(file, index=False)
    return file


def why(harness: Harness, *planted: str) -> str:
    sides = measured(harness, "before"), measured(harness, "after", *planted)
    outcome = harness("regress", *sides, "margin=0.02", code=None)
    shown = " ".join(outcome.stdout.split())
    assert "Why" in shown, shown
    return shown.split("Why ")[1]


def test_slower_iterations_are_cost(harness: Harness) -> None:
    """An iteration of 30 ms takes 31.5 ms, a regular step what it did."""
    text = why(harness, "engine.draft_ms=2.375")
    assert text.startswith("all of it is the cost of an iteration: 3."), text
    assert "tokens per iteration, the same: 1.00 (1.00 to 1.00)" in text
    assert "ms per iteration, 1.05 (1.0" in text


def test_what_is_not_known_is_not_called_the_same(harness: Harness) -> None:
    """Starts of one program differ by a third."""
    text = why(harness, "engine.start_noise=0.3", "engine.acceptance=0.68")
    assert text.startswith("3."), text
    assert "ms per iteration, cannot tell: " in text
