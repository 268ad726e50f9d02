"""Commands with an engine that is not ours, on the shipped pair."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from harness.config.settings import ModelSettings
from harness.local.engine.pair import PlacedPair
from in_process import QUICKEST_PAIR, Harness, results
from tiny_checkpoints import spaced_tokenizer

QUICK = ["engine=huggingface", "num_prompts=2", "decoding.max_new_tokens=8"]


@pytest.mark.parametrize(
    ("model", "draft"), [("tiny", "tiny_draft"), ("tiny_draft", "lookup"), ("tiny_draft", "none")]
)
def test_generate_is_measured_as_our_loop_is(harness: Harness, model: str, draft: str) -> None:
    pair = [f"model={model}", f"draft={draft}"]
    harness("latency", *QUICK, *pair, "decoding=greedy")
    rows = results()
    assert set(rows["engine"]) == {"huggingface"}
    assert set(rows["num_tokens"]) == {16}
    # It does not tell where its time goes, so nothing can be predicted.
    assert rows[["draft_ms", "verify_ms", "target_step_ms"]].isna().all(axis=None)
    if draft != "none":
        assert rows["identical_prompts"][1] == 2
        assert rows["mean_acceptance_length"][1] >= 1


def test_recovery_tests_generate_against_the_same_weights(harness: Harness) -> None:
    asked = [*QUICKEST_PAIR, "batch_size=1", "decoding=greedy"]
    assert "\n  lossless" in harness("recovery", *QUICK, *asked).stdout


@pytest.mark.parametrize(
    ("draft", "temperature", "says"),
    [
        ("spaced", "0", "has a tokenizer without a token of model="),
        ("tiny_draft", "0.5", "has 960 outputs against 320, with which generate() cannot sample"),
    ],
)
def test_vocabularies_that_generate_cannot_join_are_found_before_weights_load(
    harness: Harness,
    monkeypatch: pytest.MonkeyPatch,
    save_model: Callable[..., ModelSettings],
    draft: str,
    temperature: str,
    says: str,
) -> None:
    monkeypatch.setattr(PlacedPair, "load", None)
    if draft == "spaced":
        draft = save_model(name="draft", tokenizer=spaced_tokenizer()).name
    pair = f"model={save_model().name}", f"draft={draft}"
    outcome = harness("latency", *QUICK, *pair, f"decoding.temperature={temperature}", code=2)
    assert outcome.complaint.startswith(f"draft={draft}: {says}")
