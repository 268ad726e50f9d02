"""`repeats=2` through the command line: rounds of new processes, and a row that pools them."""

from __future__ import annotations

import pytest

from harness.config.errors import SettingError
from harness.sweep.repeats import rounds
from in_process import Harness, results
from wording import mentions

QUICK = ["latency", "num_prompts=8", "decoding.max_new_tokens=4", "num_warmup=0"]


def test_rounds_vary_slowest() -> None:
    assert rounds("latency", ["model=7B", "repeats=3"]) == ["repeat=1,2,3"]
    assert rounds("latency", ["repeats=1"]) == []
    assert rounds("latency", ["model=7B"]) == []
    assert rounds("eval", ["repeats=3"]) == []
    assert rounds("latency", ["repeats=3", "--cfg", "job"]) == []
    assert rounds("latency", ["-cd", "mine", "repeats=2"]) == ["repeat=1,2"]
    with pytest.raises(SettingError, match="search"):
        rounds("latency", ["repeats=3", "sweeper=optuna"])


def test_what_cannot_be_repeated(harness: Harness) -> None:
    assert "must be at least 1" in harness.refused("latency", "repeats=0")
    assert "at most 1000" in harness.refused("latency", "repeats=1001")


@pytest.mark.slow
def test_every_job_runs_once_before_any_runs_again(harness: Harness) -> None:
    asked = [*QUICK, "-m", "decoding.num_draft_tokens=2,3", "repeats=2"]
    ended = harness(*asked)
    lines = [line for line in ended.stderr.splitlines() if line.startswith("[")]
    assert len(lines) == 4
    for line, repeat, k in zip(lines, (1, 1, 2, 2), (2, 3, 2, 3), strict=True):
        assert f"repeat={repeat} decoding.num_draft_tokens={k}" in line
    rows = results()
    rows = rows[rows["arm"] == "speculative"]
    pooled = rows[rows["repeat"] == "all"]
    assert len(rows) == 4 + 2
    assert sorted(pooled["num_draft_tokens"]) == ["2", "3"] or sorted(
        pooled["num_draft_tokens"]
    ) == [2, 3]
    assert set(pooled["speedup_covers"]) == {"8 prompts and 2 runs with a seed each"}
    single = rows[rows["repeat"] != "all"]
    assert sorted(single["seed"]) == [0, 0, 1, 1]
    # A report shows the pooled rows in place of their runs.
    report = harness("report", "results").stdout
    assert mentions(report, "8 prompts and 2 runs")
    assert "measurements" in report
