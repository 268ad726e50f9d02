"""The heads that ship, through every command line."""

from __future__ import annotations

import pytest

from harness.local.runners import regions
from harness.local.runners.slots import UnsupportedModelError
from harness.local.runners.static import StaticRunner
from in_process import Harness, results
from wording import mentions

# What each drafts at least, with four draft tokens: far more than an untrained head, less than the model card says.
LEAST = {"tiny_eagle3": 3.5, "tiny_dflash": 2.5, "tiny_medusa": 2.5}


@pytest.mark.parametrize(
    ("head", "batch_size"), [("tiny_eagle3", 3), ("tiny_dflash", 1), ("tiny_medusa", 1)]
)
def test_latency_drafts_well_and_changes_no_text(
    head: str, batch_size: int, harness: Harness
) -> None:
    few = ["num_prompts=3", "num_warmup=0", "tokens=16", f"batch_size={batch_size}"]
    harness("latency", f"draft={head}", "decoding=greedy", *few)
    row = results().iloc[-1]
    assert row.identical_prompts == 3
    assert row.mean_acceptance_length > LEAST[head]


def test_a_head_that_cannot_be_compiled_drafts_eagerly_and_says_so(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> None:
        raise UnsupportedModelError("cannot be compiled: a test says so")

    monkeypatch.setattr(StaticRunner, "compile", lambda self, *shapes: None)
    monkeypatch.setattr("harness.local.drafting.heads.drafter.CompiledCall", refuse)
    short = ["num_prompts=2", "num_warmup=0", "decoding.max_new_tokens=4"]
    said = harness("latency", "draft=tiny_medusa", "runner=compiled", *short).stderr
    assert mentions(said, "tiny_medusa", "a test says so", "drafts eagerly")
    assert results().iloc[-1].runner == "compiled+static"


def test_a_compiled_head_changes_no_text(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parts run as they were traced; `test_compiled` has one run of inductor, which takes as long for each part."""
    monkeypatch.setattr(StaticRunner, "compile", lambda self, *shapes: None)
    monkeypatch.setattr(
        "torch._inductor.compile_fx.compile_fx", lambda part, *_, **__: part.forward
    )
    monkeypatch.setattr(regions, "_compiled", {})
    few = ["num_prompts=2", "num_warmup=0", "decoding.max_new_tokens=6", "decoding=greedy"]
    few += ["decoding.num_draft_tokens=2"]
    harness("latency", "draft=tiny_eagle3", "runner=compiled", *few)
    row = results().iloc[-1]
    assert row.runner == "compiled"
    assert row.identical_prompts == 2
    assert regions._compiled, "parts of the head"


@pytest.mark.parametrize("head", ["tiny_eagle3", "tiny_medusa"])
def test_plan_counts_a_head(head: str, harness: Harness) -> None:
    harness("plan", f"draft={head}", "gpus=1", "gpu_memory=8GB", "results.file=results/plan.csv")
    row = results("plan").iloc[-1]
    assert 500_000 < row.draft_bytes < 4_000_000
    # Medusa heads keep no cache.
    assert (row.draft_cache_bytes > 0) == (head != "tiny_medusa")
