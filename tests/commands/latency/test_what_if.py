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
    assert "read byte by byte" in outcome.stderr
    heading = outcome.stdout.partition("\n\n")[0]
    assert heading.count("random weights") == heading.count("synthetic 0.8") == 1
    for expected in (
        "speculative (lossy)",
        "decoding.synthetic_acceptance=0.8:",
    ):
        assert expected in outcome.summary
    assert "lenience" not in outcome.summary

    rows = results()
    assert list(rows["weights"]) == ["random"] * 2
    assert list(rows["synthetic_acceptance"]) == [0.8] * 2
    assert list(rows["lossy"]) == [True] * 2
    assert list(rows["num_tokens"]) == [24, 24]


def test_a_coin_that_always_falls_right_accepts_everything(harness: Harness) -> None:
    plain = [*PAIR, "draft.quantization=none", *QUICK, "decoding=greedy"]
    outcome = harness("latency", *plain, "decoding.synthetic_acceptance=1")
    row = results().iloc[-1]
    assert row["acceptance_rate"] == 1
    assert pd.isna(row["identical_prompts"]), (
        "texts are not held against each other: they differ by intention"
    )
    assert "Greedy output" not in outcome.summary


def test_the_rule_comes_back_with_null(harness: Harness) -> None:
    harness("latency", *PAIR, *QUICK, "draft.quantization=none", "num_prompts=1")
    rows = results()
    assert rows["synthetic_acceptance"].isna().all()
    assert not rows["lossy"].any()


def test_recovery_finds_the_coin(harness: Harness) -> None:
    outcome = harness(
        "recovery", *PAIR, *QUICK, "decoding=greedy", "decoding.synthetic_acceptance=0.5", code=1
    )
    assert "30B + 7B_8bit, random weights, synthetic 0.5 ·" in " ".join(outcome.stdout.split())
    assert "this says nothing about the pair itself" in " ".join(outcome.stdout.split())
    row = results("recovery").iloc[0]
    assert (row["verdict"], row["weights"]) == ("lossy", "random")


# The roofline --------------------------------------------------------------------------------------------------------


def test_the_roof_stands_beside_the_measurement(harness: Harness, save_model: SaveModel) -> None:
    model, draft = save_model("llama", "model"), save_model("gpt2", "draft")
    outcome = harness("latency", f"model={model.name}", f"draft={draft.name}", *QUICK)
    regular, speculative = (results().iloc[row] for row in (0, 1))
    assert regular["step_bytes"] > 0
    assert speculative["draft_step_bytes"] > 0
    assert pd.isna(regular["draft_step_bytes"])
    rate = copy_bandwidth(torch.device("cpu"))
    assert regular["floor_ms"] == pytest.approx(1000 * regular["step_bytes"] / rate)
    assert speculative["draft_floor_ms"] == pytest.approx(
        1000 * speculative["draft_step_bytes"] / rate
    )
    for name in ("target reads", "draft reads"):
        assert name in outcome.summary
    alone = harness("latency", f"model={model.name}", "draft=none", *QUICK)
    assert "target reads" in alone.summary
    assert "draft reads" not in alone.summary


def test_a_profile_is_of_a_gpu(harness: Harness) -> None:
    outcome = harness("latency", *PAIR, *QUICK, "profile=true", code=2)
    assert "profile=true: needs a model on a GPU" in outcome.stderr


@pytest.mark.gpu
def test_a_profile_on_a_gpu_lists_kernels(harness: Harness, tmp_path: Path) -> None:
    outcome = harness(
        "latency", *PAIR, *QUICK, "draft.quantization=none", "profile=true", "runner=eager"
    )
    assert "of regular decoding spend GPU time" in outcome.stdout
    assert len(list(tmp_path.rglob("trace_*.json.gz"))) == 2
    row: Any = results().iloc[0]
    assert row["floor_ms"] > 0
