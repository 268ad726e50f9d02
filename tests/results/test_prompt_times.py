"""Times of units, from rows of prompts made by hand."""

from __future__ import annotations

from dataclasses import replace

from harness.results.prompt_times import waits_by_unit, waits_of_both_arms
from harness.results.rows.prompts import LatencyPromptRow


def row(index: int, ms: float, first_ms: float, num_tokens: int, unit: int = 0) -> LatencyPromptRow:
    return LatencyPromptRow(
        arm="regular",
        prompt_index=index,
        prompt_place=index,
        unit=unit,
        num_tokens=num_tokens,
        time_ms=ms,
        time_to_first_token_ms=first_ms,
    )


def test_rows_of_a_batch_are_one_answer_of_mean_length() -> None:
    rows = [row(0, 100.0, 20.0, 8), row(1, 100.0, 20.0, 12)]
    assert waits_by_unit(rows, "regular") == {(0, 1): (100.0, 10.0)}


def test_two_answers_that_took_equally_long_are_no_batch() -> None:
    rows = [row(0, 100.0, 20.0, 8), row(1, 100.0, 25.0, 12)]
    assert waits_by_unit(rows, "regular") == {(0, 1): (200.0, 20.0)}


def test_a_unit_that_one_arm_lacks_is_left_out() -> None:
    regular = [row(index, 100.0, 20.0, 8, unit=index) for index in range(2)]
    speculative = [
        replace(row(index, 50.0, 20.0, 8, unit=index), arm="speculative") for index in (1, 2)
    ]
    assert waits_of_both_arms([*regular, *speculative]) == {(1,): ((100.0, 8.0), (50.0, 8.0))}
