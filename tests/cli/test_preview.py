"""What is printed in place of a run's page, or of a run."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from in_process import Harness


def test_a_dry_run_lists_jobs_and_makes_nothing(
    harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "")
    sweep = ["latency", "engine=simulated", "-m", "batch_size=1,4", "n=16", "dry_run=true"]
    launchers = ["hydra/launcher=basic"] + ["+launcher=slurm"] * (find_spec("submitit") is not None)
    for launcher in launchers:
        preview = harness(*sweep, launcher)
        assert preview.stderr == ""
        assert preview.stdout.splitlines() == [
            "  [1/2] batch_size=1: 16 prompts",
            "  [2/2] batch_size=4: 16 prompts",
            "2 jobs. Nothing was measured.",
        ]
    assert not [*tmp_path.iterdir()]
    assert harness("latency", "K=0", "dry_run=true", code=2).stdout == ""
    assert harness.refused("latency", "dry_run=yes") == "dry_run=yes: must be true or false"
    harness("latency", "engine=simulated", "dry_run=false")
    assert Path("results/latency.csv").exists()


def test_a_dry_run_needs_neither_the_program_nor_the_weights(harness: Harness) -> None:
    served = ["vllm", "serve", "a/b", "--spec-method", "ngram", "--spec-tokens", "{K}"]
    shown = harness("latency", "-m", "K=2,4", "dry_run=true", "--", *served).stdout
    assert "[2/2] K=4: 15 prompts\n      regular: vllm serve a/b" in shown
    assert "\n      speculative: vllm serve a/b --spec-method ngram --spec-tokens 4" in shown
    shown = harness("recovery", "model=65B", "draft=7B", "dry_run=true").stdout
    assert "[1/1] model=65B draft=7B" in shown


@pytest.mark.parametrize("k", ["4", "2,4"])
def test_json_is_what_the_run_has_written(harness: Harness, k: str) -> None:
    printed = harness("latency", "engine=simulated", "-m", f"K={k}", "format=json").stdout
    results = [json.loads(line) for line in printed.splitlines()]
    assert [result["rows"][-1]["num_draft_tokens"] for result in results] == [
        *map(int, k.split(","))
    ]
    assert all(result["statements"] for result in results)
