"""Acceptance of one run replayed in another, and at other K, through the command line."""

from __future__ import annotations

from typing import Any

import pytest

from harness.measuring.rows import LatencyRow
from harness.results.files import read_rows
from in_process import Harness

QUICK = ["num_prompts=12", "num_warmup=0", "decoding.max_new_tokens=20"]
QUICK += ["model=tiny_draft", "draft=early_exit_1"]


def last_row() -> Any:
    return read_rows("results/latency.csv", LatencyRow)[-1]


def overlap(first: tuple[float, float], second: tuple[float, float]) -> bool:
    return first[0] <= second[1] and second[0] <= first[1]


def interval_at(row: Any, k: int) -> tuple[float, float]:
    length = row.tokens_per_iteration_by_num_draft_tokens[k - 1]
    return length.low, length.high


def test_rates_of_one_run_are_replayed_in_another_and_predict_another_k(harness: Harness) -> None:
    harness("latency", *QUICK, "batch_size=4", "K=5")
    real = last_row()
    # Passes of 1, 2, 3, 5 and 6 tokens were timed.
    assert [ms is not None for ms in real.pass_ms_by_width] == [True, True, True, False, True, True]

    # Acceptance does not depend on the batch, which takes a third of the passes.
    rates = real.acceptance_by_position
    replayed = f"decoding.synthetic_acceptance={rates}"
    harness("latency", *QUICK, "batch_size=12", "K=5", replayed)
    synthetic = last_row()
    assert synthetic.synthetic_acceptance == rates
    expected = synthetic.tokens_per_iteration_by_num_draft_tokens[4].estimate
    assert synthetic.tokens_per_iteration == pytest.approx(expected, rel=0.1)

    # A K that was left out: its acceptance is predicted by the run with K=5.
    harness("latency", *QUICK, "batch_size=12", "decoding.num_draft_tokens=2")
    assert overlap(interval_at(last_row(), 2), interval_at(real, 2))
    # Its twin: the interval of another K is not that of this one.
    assert not overlap(interval_at(last_row(), 2), interval_at(real, 5))


def test_a_draft_of_one_pass_says_nothing_of_smaller_k(harness: Harness) -> None:
    few = ["num_prompts=2", "decoding.max_new_tokens=12"]
    harness("latency", "draft=tiny_dflash", *few)
    row = last_row()
    assert row.pass_ms_by_width is not None
    assert row.tokens_per_iteration_by_num_draft_tokens is None
