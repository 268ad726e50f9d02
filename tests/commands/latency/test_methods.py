"""Every way to draft, and every rule, through the command lines of all commands."""

from __future__ import annotations

import json

import pytest

from in_process import Harness, results
from tiny_checkpoints import save_talkative_pair

# What is typed, and what is said of it: where the models are described, and in the line of settings.
METHODS = {
    "lookup": (["draft=lookup", "draft.max_ngram=2"], "draft lookup: no weights", "K=2"),
    "shared suffix": (
        ["draft=suffix", "draft.shared=true"],
        "draft suffix: no weights",
        "searches earlier answers",
    ),
    "early exit": (
        ["draft=early_exit"],
        "draft early_exit: the first layer of the model",
        "K=2",
    ),
    "by argmax": (["draft.sampling=greedy"], "/draft: float32", "drafts by argmax"),
    "block": (["decoding.rule=block"], "/draft: float32", "rule block"),
    "typical": (["decoding.rule=typical"], "/draft: float32", "rule typical (lossy)"),
    "auto": (["decoding.num_draft_tokens=auto"], "/draft: float32", "K=auto"),
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
EACH = pytest.mark.parametrize(("typed", "described", "settings"), METHODS.values(), ids=METHODS)
# The rules and lengths that other commands handle.
SOME = pytest.mark.parametrize("typed", [METHODS[name][0] for name in ("typical", "auto")])


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """So few bytes are likely that there is something to look up."""
    return [*save_talkative_pair(tmp_path_factory.mktemp("pair"), 4), "decoding.num_draft_tokens=2"]


@EACH
def test_latency(
    harness: Harness, chatty: list[str], typed: list[str], described: str, settings: str
) -> None:
    outcome = harness("latency", *chatty, *GREEDY, *typed)
    assert described in outcome.stderr
    assert settings in " ".join(outcome.summary.split())
    rows = results()
    row = rows.iloc[-1]
    assert row["identical_prompts"] == 3, "greedy output is the regular one, with every method"
    # Something is accepted; `auto` may find that drafting does not pay.
    assert row["tokens_per_iteration"] > 1 or settings == "K=auto"
    assert 0 <= row["mean_num_draft_tokens"] <= 16
    assert str(row["num_draft_tokens"]).removesuffix(".0") == (
        "auto" if settings == "K=auto" else "2"
    )
    lossy = "decoding.rule=typical" in typed
    assert row["lossy"] == lossy
    assert ("no longer follows the target (lossy)" in outcome.summary) == lossy
    assert ("speculative (lossy)" in outcome.summary) == lossy


@SOME
def test_compare_and_eval_and_plan(harness: Harness, chatty: list[str], typed: list[str]) -> None:
    compared = harness(
        "compare", *chatty[:-2], "prompt=once upon a time", "json=true", *GREEDY[2:], *typed
    )
    record = json.loads(compared.stdout)
    assert record["identical"] is True
    answered = harness(
        "eval",
        *chatty[:-2],
        *GREEDY[:1],
        "decoding.temperature=0",
        "decoding.max_new_tokens=6",
        *typed,
    )
    rows = results("eval")
    assert rows["identical_prompts"].iloc[-1] == 3
    assert ("(lossy)" in answered.stdout) == ("decoding.rule=typical" in typed)
    harness("plan", *chatty[:-2], "decoding.num_draft_tokens=2", *typed)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["block", "typical"])
def test_recovery_finds_the_lossy_rule_and_no_other(
    harness: Harness, chatty: list[str], method: str
) -> None:
    outcome = harness(
        "recovery", *chatty, *DRAWN, *METHODS[method][0], code=int(method == "typical")
    )
    assert ("  lossy" if method == "typical" else "  lossless") in outcome.summary
