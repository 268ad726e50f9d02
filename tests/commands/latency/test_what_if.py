"""Random weights and synthetic acceptance through the command line: measured as any pair is, and labelled.

Also the roofline, which any `latency` run can have.
"""

from __future__ import annotations

import json
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
from in_process import QUICK_MODELS, Harness, only, results

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
    regular, speculative = json.loads(only("result.json").read_text())["rows"]
    assert regular["step_bytes"] > 0
    assert speculative["draft_step_bytes"] > 0
    assert regular["draft_step_bytes"] is None
    rate = copy_bandwidth(torch.device("cpu"))
    assert regular["floor_ms"] == pytest.approx(1000 * regular["step_bytes"] / rate)
    assert speculative["draft_floor_ms"] == pytest.approx(
        1000 * speculative["draft_step_bytes"] / rate
    )


def last_row() -> Any:
    return read_rows("results/latency.csv", LatencyRow)[-1]


MANY = [*QUICK_MODELS, "num_prompts=12", "num_warmup=0", "decoding.max_new_tokens=20"]


def test_rates_of_one_run_are_replayed_in_another(harness: Harness) -> None:
    harness("latency", *MANY, "batch_size=4", "K=5")
    real = last_row()
    # Acceptance does not depend on the batch, which takes a third of the passes.
    rates = real.acceptance_by_position
    replayed = f"decoding.synthetic_acceptance={rates}"
    harness("latency", *MANY, "batch_size=12", "K=5", replayed)
    synthetic = last_row()
    assert synthetic.synthetic_acceptance == rates
    assert synthetic.tokens_per_iteration == pytest.approx(real.tokens_per_iteration, rel=0.15)
    # Its twin: other rates give another yield.
    harness("latency", *MANY, "batch_size=12", "K=5", "decoding.synthetic_acceptance=0.4")
    assert last_row().tokens_per_iteration != pytest.approx(real.tokens_per_iteration, rel=0.15)
