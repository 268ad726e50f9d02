"""Every way to draft, every shipped head and every rule, random weights and synthetic acceptance, typed as users do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from harness.config.settings import ModelSettings
from harness.local.runners.base import UnsupportedModelError
from harness.local.runners.static import StaticRunner
from harness.measuring.rows import LatencyRow
from harness.results.files import read_rows
from in_process import QUICK_MODELS, Harness, only, results
from mtp_models import mtp_target, save_with_mtp
from tiny_checkpoints import make_tokenizer, save_talkative_pair
from wording import mentions

METHODS = {
    "lookup": ["draft=lookup", "draft.max_ngram=2"],
    "early exit": ["draft=early_exit", "engine=huggingface"],
    "by argmax": ["draft.sampling=greedy"],
    "block": ["decoding.rule=block"],
    "lenient": ["decoding.rule=google", "decoding.lenience=0.5"],
}
GREEDY = ["num_prompts=3", "num_warmup=0", "decoding=greedy", "decoding.max_new_tokens=12"]


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """So few bytes are likely that there is something to look up."""
    return [*save_talkative_pair(tmp_path_factory.mktemp("pair"), 4), "decoding.num_draft_tokens=2"]


@pytest.mark.parametrize("method", METHODS)
def test_latency(harness: Harness, chatty: list[str], method: str) -> None:
    harness("latency", *chatty, *GREEDY, *METHODS[method])
    row = results().iloc[-1]
    assert row["identical_prompts"] == 3, "greedy output is the regular one, with every method"
    assert row["tokens_per_iteration"] > 1
    assert 0 <= row["mean_num_draft_tokens"] <= 2
    assert row["num_draft_tokens"] == 2
    assert row["lossy"] == (method == "lenient")


def test_a_draft_that_proposes_nothing_has_a_headline_and_a_reason(
    harness: Harness, tmp_path: Path
) -> None:
    file = tmp_path / "silent.py"
    file.write_text(
        "from harness.local.drafting.method import TextMethod\n"
        "class NoText:\n"
        "    def extend(self, tokens): pass\n"
        "    def continuation(self, most): return []\n"
        "class Silent(TextMethod):\n"
        "    summary = 'proposes nothing'\n"
        "    def texts(self, settings, tokenizer): return NoText\n"
    )
    typed = ["model=tiny_draft", "prompts=tiny", "n=8", "tokens=8", f"draft={file}:Silent"]
    outcome = harness("latency", *typed)
    assert "the draft proposed nothing: 1.0 tokens" in outcome.stdout
    assert results().iloc[-1]["tokens_per_iteration"] == 1


def test_the_schedule_of_transformers_changes_k(harness: Harness, chatty: list[str]) -> None:
    by_generate = ["engine=huggingface", "decoding.num_draft_tokens=auto"]
    harness("latency", *chatty, *GREEDY, *by_generate)
    row = results().iloc[-1]
    assert (row["identical_prompts"], row["num_draft_tokens"]) == (3, "auto")
    assert row["tokens_per_iteration"] > 1
    refused = harness.refused("latency", chatty[0], "draft=lookup", *by_generate)
    assert "num_draft_tokens=auto: needs a draft model" in refused


def test_a_head_that_cannot_be_compiled_drafts_eagerly_and_says_so(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object, **named: object) -> None:
        raise UnsupportedModelError("cannot be compiled: a test says so")

    monkeypatch.setattr(StaticRunner, "compile", lambda self: setattr(self, "name", "compiled"))
    monkeypatch.setattr("harness.local.engine.preparing.prepare_calls", refuse)
    short = ["num_prompts=2", "num_warmup=0", "decoding.max_new_tokens=4"]
    said = harness("latency", "draft=tiny_medusa", "runner=compiled", *short).stderr
    assert mentions(said, "tiny_medusa", "a test says so", "run eagerly")
    row = json.loads(only("result.json").read_text())["rows"][-1]
    assert (row["runner"], row["draft_runner"]) == ("compiled", "static")


MTP_GREEDY = [
    "num_prompts=2",
    "num_warmup=0",
    "batch_size=2",
    "decoding=greedy",
    "decoding.max_new_tokens=12",
]
# Of 258 tokens, all about equally likely, two, so that their texts can be counted.
DRAWS = "num_prompts=1 decoding.max_new_tokens=4 num_draws=1000 batch_size=32 decoding.num_draft_tokens=1".split()
DRAWS += ["decoding.top_k=2", "samplings=[as_asked]"]


@pytest.fixture(scope="module")
def mtp_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    mtp_directory = tmp_path_factory.mktemp("mtp")
    save_with_mtp(*mtp_target("deepseek_v3", vocab_size=258), mtp_directory)
    make_tokenizer().save_pretrained(mtp_directory)
    (mtp_directory / "prompts.txt").write_text("once upon a time\n2 + 2 =\nthe end\n")
    return mtp_directory


def test_an_mtp_head_drafts_for_latency_recovery_and_plan(
    harness: Harness, mtp_directory: Path
) -> None:
    pair = [f"model={mtp_directory}", "draft=mtp"]
    prompts = f"prompts={mtp_directory}/prompts.txt"
    assert "draft mtp: MTP head, 0.1 MB" in harness("latency", *pair, prompts, *MTP_GREEDY).stderr
    row = results().iloc[-1]
    assert (row["draft_method"], row["runner"], row["identical_prompts"]) == ("mtp", "static", 2)
    # A loss would be found and end with 1; these few draws cannot rule out a small one.
    harness("recovery", *pair, prompts, *DRAWS, code=3)
    greedy, *sampled = results("recovery").to_dict("records")
    assert greedy["verdict"] == "lossless"
    for test in sampled:
        assert test["verdict"] != "lossy"
    harness("plan", *pair, "results.file=plan.csv")
    plan = pd.read_csv("plan.csv").iloc[-1]
    assert plan["draft_cache_bytes"] > 0
    assert plan["cache_bytes"] > 0


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
