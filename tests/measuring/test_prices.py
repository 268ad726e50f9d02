"""What an iteration costs, from rows whose times are known."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from harness.measuring.prices import iteration_cost, spent_by_unit, tokens_by_k, why_no_price
from harness.measuring.rows import LatencyRow
from harness.results.runs import Run
from harness.results.statistics.interval import Interval
from report_files import latency_run, prompt_rows

STEP_MS = 20.0
LENGTH = 65


def answering(ms_per_token: float, first_ms: float = 300.0) -> dict[str, Any]:
    """Figures of an arm by the time to its first token, and by that of each further one."""
    return {
        "ms_per_token": (first_ms + (LENGTH - 1) * ms_per_token) / LENGTH,
        "time_to_first_token_ms": first_ms,
        "target_step_ms": STEP_MS,
        "num_tokens": 10 * LENGTH,
        "num_prompts": 10,
    }


def run_of(speculative: dict[str, Any], **both: Any) -> Run[LatencyRow]:
    rows = latency_run(4)
    arms = zip(rows, (answering(STEP_MS), speculative), strict=True)
    return Run([dataclasses.replace(row, **changes, **both) for row, changes in arms])


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([1.5, 2.0, 2.3, 2.5], {1: 20.0, 2: 28.0, 3: 32.0, 4: 36.0, 5: 40.0}),
        # Nobody knows whether shorter proposals begin longer ones.
        (None, {1: 20.0, 5: 40.0}),
    ],
)
def test_a_smaller_k_drafts_and_verifies_less_and_the_rest_stays(
    lengths: list[float] | None, expected: dict[int, float]
) -> None:
    """An iteration of 40 ms: 8 ms to draft 4 tokens, a pass of 20 ms, 2 ms more for each of them, 4 ms of verdict."""
    phases = {"draft_ms": 8.0, "verify_ms": 28.0, "tokens_per_iteration": 2.5}
    by_k = lengths and [Interval(length) for length in lengths]
    known = {"tokens_per_iteration_by_num_draft_tokens": by_k}
    cost = iteration_cost([run_of(answering(40.0 / 2.5) | phases | known)])
    assert {point.width: point.ms.estimate for point in cost.points} == pytest.approx(expected)
    steps = {point.width: point.steps.estimate for point in cost.points}
    assert steps == pytest.approx({width: ms / STEP_MS for width, ms in expected.items()})


@pytest.mark.parametrize(("first_ms", "is_refused"), [(700.0, False), (1300.0, True)])
def test_a_load_at_which_answers_wait_has_no_price(first_ms: float, is_refused: bool) -> None:
    """Regular ones take 1580 ms and decode 1300. Of 2324 ms with speculation 1040 are decoding: 1.84 times as much."""
    served = {"batch_size": 4, "requests_per_second": 1.0}
    cost = iteration_cost([run_of(answering(16.0, first_ms), **served)])
    assert [*cost.refused] == ([4] if is_refused else [])
    if is_refused:
        assert "answers take 1.8 times as long" in cost.refused[4]


def test_prompts_of_several_loads_count_once_and_an_answer_of_one_token_costs_no_lap() -> None:
    runs = []
    for load in (1, 2):
        run = run_of(answering(16.0), batch_size=load, requests_per_second=1.0)
        rows = prompt_rows(run.rows, [("", 40.0 + index) for index in range(16)])
        short = {"num_tokens": 1, "num_iterations": None, "tokens_per_iteration": None}
        for index, row in enumerate(rows):
            known = {"unit": (row.prompt_index or 0) // load, "time_to_first_token_ms": 30.0}
            changes = known | (short if row.prompt_index == 0 else {})
            rows[index] = dataclasses.replace(row, **changes)
        run.prompt_rows = rows
        runs.append(run)
    assert str(tokens_by_k(runs)[4].covers) == "15 prompts"
    assert [len(spent_by_unit(run.last, run.prompt_rows)) for run in runs] == [15, 8]


def test_answers_of_one_token_are_why_there_is_no_price() -> None:
    run = run_of(answering(16.0) | {"num_tokens": 10, "mean_num_draft_tokens": None})
    assert why_no_price(run) == "answers have one token, and no iteration"


@pytest.mark.parametrize(("steps", "has_price"), [(0.79, False), (0.81, True)])
def test_an_iteration_takes_a_regular_step(steps: float, has_price: bool) -> None:
    """But for what starts of one program differ by: less is no time of an iteration."""
    run = run_of(answering(steps * STEP_MS / 2.5) | {"tokens_per_iteration": 2.5})
    assert (5 in {point.width for point in iteration_cost([run]).points}) == has_price
    reason = "" if has_price else "an iteration took less time than the regular step in it"
    assert why_no_price(run) == reason


@pytest.mark.parametrize("arm", [0, 1])
def test_tokens_that_were_held_back_in_an_arm_leave_no_price(arm: int) -> None:
    run = run_of(answering(16.0))
    run.rows[arm] = dataclasses.replace(run.rows[arm], held_back=True)
    assert why_no_price(run).startswith("tokens were held back")
