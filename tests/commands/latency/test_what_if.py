"""Random weights and synthetic acceptance through the command line: measured as any pair is, and labelled.

Also the roofline and the profile, which any `latency` run can have.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from harness.config.settings import ModelSettings
from harness.local.engine.planning import copy_bandwidth
from harness.measuring.rows import LatencyRow
from harness.results.files import read_rows
from harness.results.statistics.arrays import Floats
from harness.results.statistics.iterations import cut, tokens_per_iteration
from in_process import QUICKEST_PAIR, Harness, results

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


def last_row() -> Any:
    return read_rows("results/latency.csv", LatencyRow)[-1]


OWN_LAYERS = ["num_prompts=12", "num_warmup=0", "decoding.max_new_tokens=20"]
OWN_LAYERS += ["model=tiny_draft", "draft=early_exit_1"]


def overlap(first: tuple[float, float], second: tuple[float, float]) -> bool:
    return first[0] <= second[1] and second[0] <= first[1]


def interval_at(row: Any, k: int) -> tuple[float, float]:
    length = row.tokens_per_iteration_by_num_draft_tokens[k - 1]
    return length.low, length.high


def test_rates_of_one_run_are_replayed_in_another_and_predict_another_k(harness: Harness) -> None:
    harness("latency", *OWN_LAYERS, "batch_size=4", "K=5")
    real = last_row()
    # Passes of 1, 2, 3, 5 and 6 tokens were timed.
    assert [ms is not None for ms in real.pass_ms_by_width] == [True, True, True, False, True, True]

    # Acceptance does not depend on the batch, which takes a third of the passes.
    rates = real.acceptance_by_position
    replayed = f"decoding.synthetic_acceptance={rates}"
    harness("latency", *OWN_LAYERS, "batch_size=12", "K=5", replayed)
    synthetic = last_row()
    assert synthetic.synthetic_acceptance == rates
    expected = synthetic.tokens_per_iteration_by_num_draft_tokens[4].estimate
    assert synthetic.tokens_per_iteration == pytest.approx(expected, rel=0.1)

    # A K that was left out: its acceptance is predicted by the run with K=5.
    harness("latency", *OWN_LAYERS, "batch_size=12", "decoding.num_draft_tokens=2")
    assert overlap(interval_at(last_row(), 2), interval_at(real, 2))
    # Its twin: the interval of another K is not that of this one.
    assert not overlap(interval_at(last_row(), 2), interval_at(real, 5))


QUICK_PAIR = [*QUICKEST_PAIR, "num_prompts=2", "num_warmup=0", "decoding.max_new_tokens=24"]
NUM_TEXTS = 40
NUM_TOKENS = 400


@pytest.mark.parametrize("draft", ["lookup", "early_exit"])
def test_a_greedy_run_knows_exactly_what_another_k_yields(harness: Harness, draft: str) -> None:
    asked = ["latency", *QUICK_PAIR, "temperature=0", f"draft={draft}"]
    harness(*asked, "K=3")
    by_k = last_row().tokens_per_iteration_by_num_draft_tokens
    assert by_k is not None
    for k in (1, 2):
        harness(*asked, f"K={k}")
        assert by_k[k - 1].estimate == pytest.approx(last_row().tokens_per_iteration)


def test_what_is_not_known_exactly_is_left_out(harness: Harness) -> None:
    few = ["num_prompts=8", "decoding.max_new_tokens=8", "K=2"]
    harness("latency", "model=tiny_draft", "draft=early_exit", *few, "decoding.rule=typical")
    assert last_row().tokens_per_iteration_by_num_draft_tokens is None


def hard_in_runs(rng: np.random.Generator) -> Floats:
    """Chances of acceptance by token, 0.98 or 0.3, in a chain of easy and hard tokens."""
    chances = []
    is_hard = False
    for drawn in rng.random(NUM_TOKENS):
        is_hard = bool(drawn < (0.7 if is_hard else 0.12))
        chances.append(0.3 if is_hard else 0.98)
    return np.array(chances)


def two_right_then_one_wrong(rng: np.random.Generator) -> Floats:
    return np.array([0.0 if place % 3 == 2 else 1.0 for place in range(NUM_TOKENS)])


def decoded(rng: np.random.Generator, chances: Floats, num_draft_tokens: int) -> list[Any]:
    """[proposed, accepted] of each iteration that decodes a text of n tokens, the first of which is there already."""
    outcomes = []
    place = 0
    last = len(chances) - 1
    while place < last:
        proposed = min(num_draft_tokens, last - place - 1)
        accepted = 0
        while accepted < proposed and rng.random() < chances[place + accepted]:
            accepted += 1
        outcomes.append((proposed, accepted))
        place += accepted + 1
    return outcomes


def cut_of(chances: Floats, most: int) -> Any:
    """[n - 1, most]: where the draft does not depend on where its iteration began, a(s, j) = a(s + j)."""
    last = len(chances) - 1
    along = np.full((last, most), np.nan)
    for begin in range(last):
        offered = chances[begin : min(begin + most, last - 1)]
        along[begin, : len(offered)] = offered
    return cut(along)


@pytest.mark.parametrize("chain", [hard_in_runs, two_right_then_one_wrong])
def test_lengths_of_smaller_k_are_those_of_decoding(chain: Any) -> None:
    """40 texts whose hard tokens stand together or apart."""
    rng = np.random.default_rng(0)
    texts = [chain(rng) for _ in range(NUM_TEXTS)]
    exact = tokens_per_iteration([cut_of(text, 8) for text in texts], range(NUM_TEXTS))
    for k in (1, 2, 4, 8):
        # 200 times the coins of one run: the standard error is below 0.1 %.
        num_iterations = sum(len(decoded(rng, text, k)) for text in texts for _ in range(5))
        truth = 5 * NUM_TEXTS * (NUM_TOKENS - 1) / num_iterations
        found = exact[k - 1]
        assert found.estimate == pytest.approx(truth, rel=0.01)
        assert found.low - 0.01 < truth < found.high + 0.01
