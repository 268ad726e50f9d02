"""Hybrids through the command line: figures, losslessness, and where they are taken."""

from __future__ import annotations

import pytest

from harness.drafting.heads.prepared import PreparedHead
from harness.runners.compiled import PreparedRunner
from in_process import Harness, results
from tiny_checkpoints import save_talkative_pair

FEW = ["num_prompts=3", "num_warmup=0", "decoding.max_new_tokens=16", "num_resamples=100"]


def test_a_sweep_measures_hybrids(harness: Harness) -> None:
    hybrids = ["suffix+tiny_eagle3", "lookup+tiny_draft"]
    drafts = "draft=" + ",".join([*hybrids, "tiny_draft"])
    # What one of them has not is set for the other alone.
    settings = ["draft.least_text=3", "draft.max_depth=16", "batch_size=3", "decoding=greedy"]
    harness("latency", "-m", drafts, *settings, *FEW)
    rows = results()
    rows = rows[rows.arm == "speculative"]
    assert set(rows.status) == {"ok"}
    assert list(rows.draft) == [*hybrids, "tiny_draft"]
    assert list(rows.draft_method) == ["suffix+model", "lookup+model", "model"]
    assert list(rows.identical_prompts) == [3, 3, 3]
    assert (rows.mean_acceptance_length > 2).all()


def test_the_head_of_a_hybrid_is_prepared(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiling takes many seconds, and is tested with heads of every kind."""
    prepared: list[object] = []
    monkeypatch.setattr(PreparedRunner, "prepare", lambda runner, shapes: None)
    monkeypatch.setattr(PreparedHead, "prepare", lambda head, *shapes: prepared.append(head))
    harness("latency", "draft=suffix+tiny_eagle3", "runner=compiled", "batch_size=3", *FEW)
    assert list(map(type, prepared)) == [PreparedHead]
    assert set(results().runner) == {"compiled"}


def test_what_a_text_proposes_is_accepted(harness: Harness) -> None:
    repeated = "prompt=" + "one two three four five six " * 4
    short = ["decoding=greedy", "decoding.max_new_tokens=24", "json=true"]
    draft = ["draft=lookup+early_exit_2", "draft.least_text=1", "decoding.num_draft_tokens=auto"]
    assert '"identical": true' in harness("compare", *draft, repeated, *short).stdout


def test_plan_counts_the_head(harness: Harness) -> None:
    for draft in ("tiny_eagle3", "suffix+tiny_eagle3"):
        harness("plan", f"draft={draft}", "results.file=results/plan.csv")
    alone, hybrid = results("plan").draft_bytes
    assert alone == hybrid


@pytest.mark.parametrize("fault", ["none", "rollback_off_by_one"])
def test_recovery_judges_a_hybrid(
    harness: Harness, tmp_path_factory: pytest.TempPathFactory, fault: str
) -> None:
    target, draft, prompts = save_talkative_pair(tmp_path_factory.mktemp("pair"), 8)
    hybrid = [draft.replace("draft=", "draft=suffix+"), "draft.least_text=1"]
    few = ["num_prompts=2", "decoding.max_new_tokens=8", "decoding.num_draft_tokens=2", "shift=0.3"]
    draws = ["batch_size=500", "num_draws=5000"]
    lossless = fault == "none"
    chosen = [] if lossless else [f"fault={fault}"]
    code = 0 if lossless else 1
    found = harness("recovery", target, *hybrid, prompts, *few, *draws, *chosen, code=code)
    assert ("Lossless:" in found.summary) == lossless
