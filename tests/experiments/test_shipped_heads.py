"""The heads that ship, through every command line."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from harness.config.names import PACKAGE
from in_process import Harness, in_process

HEADS = ["tiny_eagle3", "tiny_dflash", "tiny_medusa"]
# What each drafts at least, with four draft tokens: far more than an untrained head, less than the model card says.
LEAST = {"tiny_eagle3": 3.5, "tiny_dflash": 2.5, "tiny_medusa": 2.5}


@pytest.fixture
def harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Harness:
    monkeypatch.chdir(tmp_path)
    return in_process(monkeypatch, capsys)


@pytest.mark.parametrize("head", HEADS)
def test_shipped_head_is_small_and_has_a_card(head: str) -> None:
    shipped = PACKAGE / "models" / "shipped"
    assert sum(file.stat().st_size for file in (shipped / head).iterdir()) < 2_000_000
    assert head in (shipped / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("head", HEADS)
def test_latency_drafts_well_and_changes_no_text(head: str, batch_size: int, harness: Harness, tmp_path: Path) -> None:
    few = ["num_prompts=4", "num_warmup=0", "decoding.max_new_tokens=40", f"batch_size={batch_size}"]
    outcome = harness("latency", f"draft={head}", "decoding=greedy", *few)
    assert outcome.exit_code == 0, outcome.stderr
    assert f"{head.removeprefix('tiny_')} head" in outcome.stderr
    row = pd.read_csv(tmp_path / "results" / "latency.csv").iloc[-1]
    assert row.identical_prompts == 4
    assert row.mean_acceptance_length > LEAST[head]


@pytest.mark.parametrize("head", HEADS)
def test_compare_races_a_head(head: str, harness: Harness) -> None:
    prompt = "prompt=Once upon a time there was a"
    outcome = harness("compare", f"draft={head}", prompt, "decoding=greedy", "decoding.max_new_tokens=24", "json=true")
    assert outcome.exit_code == 0, outcome.stderr
    assert '"identical": true' in outcome.stdout


@pytest.mark.parametrize("head", HEADS)
def test_eval_answers_the_same_with_a_head(head: str, harness: Harness, tmp_path: Path) -> None:
    outcome = harness("eval", f"draft={head}", "num_prompts=12", "batch_size=12", "decoding=greedy")
    assert outcome.exit_code == 0, outcome.stderr
    row = pd.read_csv(tmp_path / "results" / "eval.csv").iloc[-1]
    assert row.identical_prompts == 12


@pytest.mark.parametrize("head", HEADS)
def test_recovery_calls_no_head_lossy(head: str, harness: Harness, tmp_path: Path) -> None:
    few = ["num_prompts=2", "num_draws=4000", "decoding.max_new_tokens=16", "batch_size=128"]
    outcome = harness("recovery", f"draft={head}", "decoding.num_draft_tokens=2", *few)
    assert outcome.exit_code in (0, 3), outcome.stderr
    verdicts = pd.read_csv(tmp_path / "results" / "recovery.csv").verdict
    assert set(verdicts) <= {"lossless", "undecided"}
    assert verdicts[0] == "lossless"  # of the greedy texts


@pytest.mark.parametrize("head", HEADS)
def test_plan_counts_a_head(head: str, harness: Harness, tmp_path: Path) -> None:
    outcome = harness("plan", f"draft={head}", "gpus=1", "gpu_memory=8GB", "results.file=plan.csv")
    assert outcome.exit_code == 0, outcome.stderr
    row = pd.read_csv(tmp_path / "plan.csv").iloc[-1]
    assert 500_000 < row.draft_bytes < 4_000_000
    # Medusa heads keep no cache.
    assert (row.draft_cache_bytes > 0) == (head != "tiny_medusa")
