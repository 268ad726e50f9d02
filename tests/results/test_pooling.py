"""Several runs of `latency` pooled into one row per arm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.results.files import append_rows
from harness.results.pooling import pooled_rows
from harness.results.rows.latency import LatencyPromptRow, LatencyRow
from harness.results.statistics.runs import ratio_over_runs
from report_files import latency_run

NUM_PROMPTS = 10


def measured(directory: Path, repeat: int, slowness: float, **changes: Any) -> list[LatencyRow]:
    """A run whose regular arm takes 40 ms per prompt and token, times a slowness of the run."""
    folder = directory / str(repeat)
    folder.mkdir()
    prompts = [
        LatencyPromptRow(
            run=f"run-{repeat}",
            prompt_index=index,
            arm=arm,
            unit=index,
            num_tokens=10,
            time_ms=10 * (40 + index) * slowness / (2 if arm == "speculative" else 1),
        )
        for index in range(NUM_PROMPTS)
        for arm in ("regular", "speculative")
    ]
    # Runs differ in the regular arm alone.
    append_rows(folder / "latency_prompts.csv", prompts)
    asked: dict[str, Any] = {
        "run": f"run-{repeat}", "measurement": f"digest-{repeat}", "directory": str(folder), "repeat": repeat,
        "speedup_covers": f"{NUM_PROMPTS} prompts", "num_prompts": NUM_PROMPTS, "speedup": 2.0,
        "draft_ms": float(repeat), "interleaved": True, "acceptance_histogram": [1] * repeat, "temperature": 0.0,
    }  # fmt: skip
    return latency_run(**(asked | changes))


def test_an_interval_over_prompts_and_runs(tmp_path: Path) -> None:
    slownesses = (1.0, 1.1, 0.95)
    runs = [measured(tmp_path, number, slow) for number, slow in enumerate(slownesses, 1)]
    regular, speculative = pooled_rows(runs)
    ms = np.array([[(40 + index) * slow for index in range(NUM_PROMPTS)] for slow in slownesses])
    expected = ratio_over_runs(ms, ms / 2).interval()
    assert speculative.speedup == pytest.approx(expected.estimate)
    assert speculative.speedup_low == pytest.approx(expected.low)
    assert speculative.speedup_high == pytest.approx(expected.high)
    assert speculative.speedup_covers == "10 prompts and 3 runs"
    assert (speculative.repeat, speculative.repeats) == ("all", 3)
    assert speculative.pooled_runs == regular.pooled_runs == ["run-1", "run-2", "run-3"]
    assert speculative.run == regular.run
    assert speculative.draft_ms == 2.0
    assert speculative.acceptance_histogram == [3, 2, 1]
    assert speculative.interleaved is True
    assert regular.speedup is None


def test_sampled_runs_have_a_seed_each(tmp_path: Path) -> None:
    runs = [measured(tmp_path, number, 1.0, temperature=0.5) for number in (1, 2)]
    assert pooled_rows(runs)[-1].speedup_covers == "10 prompts and 2 runs with a seed each"


def test_runs_that_failed_are_left_out(tmp_path: Path) -> None:
    good = [measured(tmp_path, number, 1.0) for number in (1, 2)]
    bad = measured(tmp_path, 3, 1.0, status="failed")
    assert pooled_rows([*good, bad])[-1].repeats == 2
    assert pooled_rows([good[0], bad]) == []


def test_without_the_prompts_there_is_no_interval(tmp_path: Path) -> None:
    runs = [measured(tmp_path, number, 1.0) for number in (1, 2)]
    (tmp_path / "2" / "latency_prompts.csv").unlink()
    pooled = pooled_rows(runs)[-1]
    assert (pooled.speedup, pooled.speedup_low, pooled.speedup_covers) == (2.0, None, None)
