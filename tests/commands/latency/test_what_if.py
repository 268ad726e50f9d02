"""Random weights and synthetic acceptance through the command line: measured as any pair is, and labelled.

Also the roofline and the profile, which any `latency` run can have.
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
from in_process import Harness, results

SaveModel = Callable[..., ModelSettings]
# Presets' own architectures, scaled down.
SMALL = "num_hidden_layers=2 hidden_size=64 intermediate_size=128 num_attention_heads=4 num_key_value_heads=4"
PAIR = [
    "model=30B", "draft=7B_8bit", "weights=random",
    *(f"{role}.architecture.{size}" for role in ("model", "draft") for size in SMALL.split()),
]  # fmt: skip
QUICK = [
    "prompts=prompts.txt",
    "num_prompts=3",
    "decoding.max_new_tokens=8",
    "decoding.num_draft_tokens=3",
]


@pytest.fixture(autouse=True)
def _prompts_and_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    (tmp_path / "prompts.txt").write_text("one\ntwo words\nthree words now\n")


def test_a_pair_nobody_has_is_measured(harness: Harness) -> None:
    outcome = harness("latency", *PAIR, *QUICK, "decoding.synthetic_acceptance=0.8")
    assert "model 30B: random weights, float32 on cpu" in outcome.stderr
    assert "draft 7B_8bit: random weights, 8bit, float32 on cpu" in outcome.stderr
    rows = results()
    assert list(rows["weights"]) == ["random"] * 2
    assert list(rows["synthetic_acceptance"]) == [0.8] * 2
    assert list(rows["lossy"]) == [True] * 2
    assert list(rows["num_tokens"]) == [24, 24]


def test_a_coin_that_always_falls_right_accepts_everything(harness: Harness) -> None:
    plain = [*PAIR, "draft.quantization=none", *QUICK, "decoding=greedy"]
    harness("latency", *plain, "decoding.synthetic_acceptance=1")
    row = results().iloc[-1]
    assert row["acceptance_rate"] == 1
    assert pd.isna(row["identical_prompts"]), "texts differ by intention"


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


@pytest.mark.gpu
def test_a_profile_on_a_gpu_lists_kernels(harness: Harness, tmp_path: Path) -> None:
    outcome = harness(
        "latency", *PAIR, *QUICK, "draft.quantization=none", "profile=true", "runner=eager"
    )
    assert "of regular decoding spend GPU time" in outcome.stdout
    assert len(list(tmp_path.rglob("trace_*.json.gz"))) == 2
    row: Any = results().iloc[0]
    assert row["floor_ms"] > 0
