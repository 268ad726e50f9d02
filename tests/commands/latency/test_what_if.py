"""Random weights and synthetic acceptance through the command line: measured as any pair is, and labelled.

Also the roofline, which any `latency` run can have.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from harness.config.settings import ModelSettings
from harness.local.engine.planning import copy_bandwidth
from harness.measuring.rows import LatencyRow
from harness.results.files import read_rows
from in_process import QUICK_MODELS, QUICKEST_PAIR, Harness, results

SaveModel = Callable[..., ModelSettings]
# Presets' own architectures, scaled down.
SMALL = "num_hidden_layers=2 hidden_size=64 intermediate_size=128 num_attention_heads=4 num_key_value_heads=4"
PAIR = [
    "model=30B", "draft=7B_8bit", "weights=random",
    *(f"{role}.architecture.{size}" for role in ("model", "draft") for size in SMALL.split()),
]  # fmt: skip
QUICK = ["num_prompts=3", "tokens=8", "K=3", "prompts=prompts.txt"]


@pytest.fixture(autouse=True)
def _prompts_and_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    (tmp_path / "prompts.txt").write_text("one\ntwo words\nthree words now\n")


def test_a_pair_nobody_has_is_measured(harness: Harness) -> None:
    always = ["decoding.synthetic_acceptance=1", "decoding=greedy"]
    outcome = harness("latency", *PAIR, *QUICK, *always)
    assert "model 30B: random weights, float32 on cpu" in outcome.stderr
    assert "draft 7B_8bit: random weights, 8bit, float32 on cpu" in outcome.stderr
    rows = results()
    assert list(rows["weights"]) == ["random"] * 2
    assert list(rows["synthetic_acceptance"]) == [1] * 2
    assert list(rows["lossy"]) == [True] * 2
    assert list(rows["num_tokens"]) == [24, 24]
    assert rows["acceptance_rate"][1] == 1
    assert pd.isna(rows["identical_prompts"][1]), "texts differ by intention"


def test_the_roof_stands_beside_the_measurement(harness: Harness, save_model: SaveModel) -> None:
    model, draft = save_model("llama", "model"), save_model("gpt2", "draft")
    harness("latency", f"model={model.name}", f"draft={draft.name}", *QUICK)
    regular, speculative = (results().iloc[row] for row in (0, 1))
    assert regular["step_bytes"] > 0
    assert speculative["draft_step_bytes"] > 0
    assert pd.isna(regular["draft_step_bytes"])
    rate = copy_bandwidth(torch.device("cpu"))
    assert regular["floor_ms"] == pytest.approx(1000 * regular["step_bytes"] / rate)
    assert speculative["draft_floor_ms"] == pytest.approx(
        1000 * speculative["draft_step_bytes"] / rate
    )


def last_row() -> Any:
    return read_rows("results/latency.csv", LatencyRow)[-1]


MANY = [*QUICK_MODELS, "num_prompts=12", "num_warmup=0", "decoding.max_new_tokens=20"]


def overlap(first: tuple[float, float], second: tuple[float, float]) -> bool:
    return first[0] <= second[1] and second[0] <= first[1]


def interval_at(row: Any, k: int) -> tuple[float, float]:
    length = row.tokens_per_iteration_by_num_draft_tokens[k - 1]
    return length.low, length.high


def test_rates_of_one_run_are_replayed_in_another_and_predict_another_k(harness: Harness) -> None:
    harness("latency", *MANY, "batch_size=4", "K=5")
    real = last_row()
    # Passes of 1, 2, 3, 5 and 6 tokens were timed.
    assert [ms is not None for ms in real.pass_ms_by_width] == [True, True, True, False, True, True]

    # Acceptance does not depend on the batch, which takes a third of the passes.
    rates = real.acceptance_by_position
    replayed = f"decoding.synthetic_acceptance={rates}"
    harness("latency", *MANY, "batch_size=12", "K=5", replayed)
    synthetic = last_row()
    assert synthetic.synthetic_acceptance == rates
    expected = synthetic.tokens_per_iteration_by_num_draft_tokens[4].estimate
    assert synthetic.tokens_per_iteration == pytest.approx(expected, rel=0.1)

    # A K that was left out: its acceptance is predicted by the run with K=5.
    harness("latency", *MANY, "batch_size=12", "decoding.num_draft_tokens=2")
    assert overlap(interval_at(last_row(), 2), interval_at(real, 2))
    # Its twin: the interval of another K is not that of this one.
    assert not overlap(interval_at(last_row(), 2), interval_at(real, 5))


QUICK_PAIR = [*QUICKEST_PAIR, "num_prompts=2", "num_warmup=0", "decoding.max_new_tokens=24"]


def test_a_greedy_run_knows_exactly_what_another_k_yields(harness: Harness) -> None:
    """With models that read their answers again: `tests/commands/acceptance`."""
    asked = ["latency", *QUICK_PAIR, "temperature=0"]
    harness(*asked, "K=3")
    by_k = last_row().tokens_per_iteration_by_num_draft_tokens
    for k in (1, 2):
        harness(*asked, f"K={k}")
        assert by_k[k - 1].estimate == pytest.approx(last_row().tokens_per_iteration)


def test_what_is_not_known_exactly_is_left_out(harness: Harness) -> None:
    few = ["num_prompts=8", "decoding.max_new_tokens=8", "K=2"]
    harness("latency", *QUICK_MODELS, *few, "decoding.rule=google", "decoding.lenience=0.5")
    assert last_row().tokens_per_iteration_by_num_draft_tokens is None
