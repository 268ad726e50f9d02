"""What is printed in place of a run's page, or of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from in_process import Harness


def test_a_dry_run_says_how_long_and_whether_there_is_an_interval(
    harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sweep = ["latency", "engine=simulated", "-m", "batch_size=1,4", "n=16", "dry_run=true"]
    preview = harness(*sweep)
    assert preview.stderr == ""
    lines = preview.stdout.splitlines()
    assert lines[-1].startswith("2 jobs: 2 of unknown time")
    assert "no interval" not in lines[0]
    assert lines[1].endswith("16 prompts, no interval below num_prompts=32")
    assert not [*tmp_path.iterdir()]
    harness("latency", "engine=simulated")
    assert "16 prompts, about 0:00:" in harness(*sweep).stdout
    assert not (tmp_path / "multirun").exists()
    assert harness("latency", "K=0", "dry_run=true", code=2).stdout == ""
    assert harness.refused("latency", "dry_run=yes") == "dry_run=yes: must be true or false"


@pytest.mark.parametrize("k", ["4", "2,4"])
def test_json_is_what_the_run_has_written(harness: Harness, k: str) -> None:
    printed = harness("latency", "engine=simulated", "-m", f"K={k}", "format=json").stdout
    results = [json.loads(line) for line in printed.splitlines()]
    assert [result["rows"][-1]["num_draft_tokens"] for result in results] == [
        *map(int, k.split(","))
    ]
    assert all(result["statements"] for result in results)
