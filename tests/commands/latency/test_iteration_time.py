"""The time of an iteration against that of a regular step, from planted rows whose costs are known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from harness.commands.latency.costs import share_of_iteration
from harness.measuring.rows import LatencyRow
from harness.results.rows.prompts import LatencyPromptRow
from harness.results.runs import Run
from report_files import latency_run, over

STEP_MS = 22.0
FIRST_MS = 300.0
LENGTH = 65
NUM_PROMPTS = 12
K = 4
TOKENS = 3.0


def run_of(iteration_ms: float, **changes: Any) -> Run[LatencyRow]:
    """A run against a server whose prompts take different numbers of iterations."""
    rng = np.random.default_rng(K)
    prompts = []
    for place in range(NUM_PROMPTS):
        num_iterations = round((LENGTH - 1) / (TOKENS * rng.uniform(0.7, 1.3)))
        times = {"speculative": num_iterations * iteration_ms, "regular": (LENGTH - 1) * STEP_MS}
        prompts += [
            LatencyPromptRow(
                prompt_index=place, prompt_place=place, arm=arm, num_tokens=LENGTH, time_ms=FIRST_MS + time,
                time_to_first_token_ms=FIRST_MS, num_iterations=num_iterations if arm == "speculative" else None,
            )
            for arm, time in times.items()
        ]  # fmt: skip
    regular_ms = (FIRST_MS + (LENGTH - 1) * STEP_MS) / LENGTH
    ms = (FIRST_MS + (LENGTH - 1) * iteration_ms / TOKENS) / LENGTH
    figures: dict[str, Any] = {
        "engine": "server", "draft": "head", "draft_method": "eagle3", "num_prompts": NUM_PROMPTS, "mean_proposed": K,
        "num_tokens": NUM_PROMPTS * LENGTH, "time_to_first_token_ms": FIRST_MS, "tokens_per_iteration": TOKENS,
        "requests_per_second": 1.0, "draft_ms": None, "verify_ms": None, "predicted_speedup": None,
        "speedup_covers": over(NUM_PROMPTS), "temperature": 0.0,
    }  # fmt: skip
    both = latency_run(K, regular_ms / ms, **figures | changes)
    times = dict(zip(("regular", "speculative"), (regular_ms, ms), strict=True))
    rows = [row.from_values(row.values() | {"ms_per_token": times[str(row.arm)]}) for row in both]
    run = Run(rows)
    run.prompt_rows = prompts
    return run


SHORT = {"num_tokens": 1, "num_iterations": None, "time_ms": FIRST_MS}


def unfinished(row: LatencyPromptRow) -> LatencyPromptRow | None:
    """Of the first prompt one arm has no answer, and the other a slow one."""
    if row.prompt_index:
        return row
    return replace(row, time_ms=99 * STEP_MS * LENGTH) if row.arm == "regular" else None


@pytest.mark.parametrize(
    "changed",
    [
        lambda row: row,
        # Without the rows of prompts it follows from the means of the run.
        lambda row: None,
        unfinished,
        lambda row: row if row.prompt_index else replace(row, **SHORT),
        lambda row: replace(row, **SHORT),
        # It follows from the mean where a server reports no iterations.
        lambda row: replace(row, num_iterations=None),
    ],
)
def test_the_planted_share_is_found(
    changed: Callable[[LatencyPromptRow], LatencyPromptRow | None],
) -> None:
    run = run_of(33.8)
    run.prompt_rows = [*filter(None, map(changed, run.prompt_rows))]
    assert share_of_iteration(run) == pytest.approx(STEP_MS / 33.8, rel=0.05)


@pytest.mark.parametrize(
    "changes",
    [
        # Rows of a batch wait for the longest.
        {"batch_size": 4, "engine": "local", "requests_per_second": None},
        # Iterations that drafted nothing are not counted.
        {"draft": "ngram-mod", "tokens_per_iteration": None},
        {"tokens_per_iteration": None, "mean_acceptance_length": None},
        # The first of two commands may draft too.
        {"draft": "second command"},
    ],
)
def test_an_iteration_without_a_known_time_has_no_share(changes: dict[str, Any]) -> None:
    assert share_of_iteration(run_of(33.8, **changes)) is None


@pytest.mark.parametrize(("steps", "is_known"), [(0.79, False), (0.81, True)])
def test_an_iteration_takes_a_regular_step(steps: float, is_known: bool) -> None:
    """But for what starts of one program differ by: less is no time of an iteration."""
    assert (share_of_iteration(run_of(steps * STEP_MS)) is not None) == is_known
