"""Every way to draft, and every rule, through the command lines of all commands."""

from __future__ import annotations

import json

import pytest

from in_process import Harness, results
from tiny_checkpoints import save_talkative_pair

METHODS = {
    "lookup": ["draft=lookup", "draft.max_ngram=2"],
    "shared suffix": ["draft=suffix", "draft.shared=true"],
    "early exit": ["draft=early_exit"],
    "by argmax": ["draft.sampling=greedy"],
    "block": ["decoding.rule=block"],
    "typical": ["decoding.rule=typical"],
    "auto": ["decoding.num_draft_tokens=auto"],
}
GREEDY = ["num_prompts=3", "num_warmup=0", "decoding=greedy", "decoding.max_new_tokens=12"]
DRAWN = [
    "num_prompts=3",
    "decoding.max_new_tokens=8",
    "num_draws=1500",
    "shift=0.3",
    "batch_size=64",
    "samplings=[as_asked]",
]
# The rules and lengths that other commands handle.
SOME = pytest.mark.parametrize("typed", [METHODS["typical"], METHODS["auto"]])


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """So few bytes are likely that there is something to look up."""
    return [*save_talkative_pair(tmp_path_factory.mktemp("pair"), 4), "decoding.num_draft_tokens=2"]


@pytest.mark.parametrize("method", METHODS)
def test_latency(harness: Harness, chatty: list[str], method: str) -> None:
    harness("latency", *chatty, *GREEDY, *METHODS[method])
    row = results().iloc[-1]
    assert row["identical_prompts"] == 3, "greedy output is the regular one, with every method"
    # Something is accepted; `auto` may find that drafting does not pay.
    assert row["tokens_per_iteration"] > 1 or method == "auto"
    assert 0 <= row["mean_num_draft_tokens"] <= 16
    assert str(row["num_draft_tokens"]).removesuffix(".0") == ("auto" if method == "auto" else "2")
    assert row["lossy"] == (method == "typical")


@SOME
def test_compare_and_eval_and_plan(harness: Harness, chatty: list[str], typed: list[str]) -> None:
    compared = harness(
        "compare", *chatty[:-2], "prompt=once upon a time", "json=true", *GREEDY[2:], *typed
    )
    assert json.loads(compared.stdout)["identical"] is True
    harness("eval", *chatty[:-2], "num_prompts=3", "temperature=0", "tokens=6", *typed)
    assert results("eval")["identical_prompts"].iloc[-1] == 3
    harness("plan", *chatty[:-2], "decoding.num_draft_tokens=2", *typed)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["block", "typical"])
def test_recovery_finds_the_lossy_rule_and_no_other(
    harness: Harness, chatty: list[str], method: str
) -> None:
    harness("recovery", *chatty, *DRAWN, *METHODS[method], code=int(method == "typical"))
    assert results("recovery")["verdict"].iloc[-1] == (
        "lossy" if method == "typical" else "lossless"
    )
