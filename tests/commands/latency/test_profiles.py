"""Acceptance of one run replayed in another, and at other K, through the command line."""

from __future__ import annotations

from typing import Any

import pytest

from harness.measuring.rows import LatencyRow
from harness.results.files import read_rows
from in_process import Harness
from wording import mentions

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
    batch = ["batch_size=4", "decoding.num_draft_tokens=5"]
    outcome = harness("latency", *QUICK, *batch)
    real = last_row()
    predicted = ["predicted", "acceptance alone", "verification timed by width"]
    # Passes that contradict each other, by noise, predict nothing.
    assert mentions(outcome.summary, *predicted) or "by K " not in outcome.summary
    # Passes of 1, 2, 3, 5 and 6 tokens were timed.
    assert [ms is not None for ms in real.pass_ms_by_width] == [True, True, True, False, True, True]

    # Acceptance does not depend on the batch, which takes a third of the passes.
    rates = real.acceptance_by_position
    replayed = harness(
        "latency",
        *QUICK,
        "batch_size=12",
        "decoding.num_draft_tokens=5",
        f"decoding.synthetic_acceptance={rates}",
    )
    synthetic = last_row()
    assert synthetic.synthetic_acceptance == rates
    assert "synthetic [0." in replayed.stdout
    expected = synthetic.tokens_per_iteration_by_num_draft_tokens[4].estimate
    assert synthetic.tokens_per_iteration == pytest.approx(expected, rel=0.1)

    # A K that was left out: its acceptance is predicted by the run with K=5.
    harness("latency", *QUICK, "batch_size=12", "decoding.num_draft_tokens=2")
    assert overlap(interval_at(last_row(), 2), interval_at(real, 2))
    # Its twin: the interval of another K is not that of this one.
    assert not overlap(interval_at(last_row(), 2), interval_at(real, 5))


def test_a_draft_of_one_pass_says_nothing_of_smaller_k(harness: Harness) -> None:
    few = ["num_prompts=2", "decoding.max_new_tokens=12"]
    outcome = harness("latency", "draft=tiny_dflash", *few)
    assert "by K " not in outcome.summary
    row = last_row()
    assert row.pass_ms_by_width is not None
    assert row.tokens_per_iteration_by_num_draft_tokens is None


def test_blocks_know_smaller_k_from_their_texts_alone(harness: Harness) -> None:
    few = ["num_prompts=2", "decoding.max_new_tokens=12"]
    harness("latency", *QUICK[3:], *few, "decoding.rule=block")
    row = last_row()
    assert len(row.tokens_per_iteration_by_num_draft_tokens) == 4
