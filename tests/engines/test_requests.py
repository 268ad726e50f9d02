"""What follows from the record of a request: its times, its bursts and its iterations."""

from __future__ import annotations

from typing import Any

import pytest

from harness.engines.counts import DraftCounts
from harness.engines.requests import RequestError, RequestRecord


def record(**known: Any) -> RequestRecord:
    return RequestRecord(0, 3, **known)


def test_tokens_that_arrive_together_are_one_burst() -> None:
    """Four tokens after the first take 400 ms, so that arrivals within 10 ms belong together."""
    times = record(arrivals=[0.5, 0.509, 0.7, 0.711, 0.9], seconds=1.2, num_tokens=5)
    assert times.time_to_first_token_ms == 500
    assert times.time_per_output_token_ms == pytest.approx(100)
    assert times.bursts == [0.5, 0.7, 0.711, 0.9]
    assert times.inter_token_latencies_ms == pytest.approx([200, 11, 189])
    assert record(arrivals=[0.5], num_tokens=2).time_per_output_token_ms is None
    assert record(arrivals=[0.5, 0.7], num_tokens=1).time_per_output_token_ms is None
    assert record(arrivals=[0.5, 0.7], num_tokens=2).time_per_output_token_ms is not None
    nothing = record()
    assert (nothing.time_to_first_token_ms, nothing.bursts) == (None, [])


# Three iterations drafted something.
HISTOGRAM = DraftCounts(accepted=4, iterations=3, accepted_at=[2, 2])


@pytest.mark.parametrize(
    ("known", "num_iterations", "draft_tokens"),
    [
        ({"outcomes": [(4, 2), (3, 3)], "num_tokens": 9}, 2, (7, 5)),
        ({"num_tokens": 9}, 8, (0, 0)),
        ({}, 0, (0, 0)),
        # Totals, of answers with all tokens that were asked for.
        ({"drafts": DraftCounts(proposed=8, accepted=5), "num_tokens": 9, "max_new_tokens": 9}, 3, (8, 5)),
        ({"drafts": DraftCounts(proposed=8, accepted=5), "num_tokens": 9, "max_new_tokens": 10}, None, (8, 5)),
        ({"drafts": DraftCounts(proposed=8, accepted=7), "num_tokens": 9, "max_new_tokens": 9}, 1, (8, 7)),
        ({"drafts": DraftCounts(proposed=8, accepted=8), "num_tokens": 9, "max_new_tokens": 9}, None, (8, 8)),
        ({"drafts": HISTOGRAM, "num_tokens": 9}, 4, (0, 4)),
        ({"drafts": HISTOGRAM, "num_tokens": 6}, 3, (0, 4)),
    ],
)  # fmt: skip
def test_iterations_follow_from_what_is_reported(
    known: dict[str, Any], num_iterations: int | None, draft_tokens: tuple[int, int]
) -> None:
    request = record(**known)
    assert (request.num_iterations, request.draft_tokens) == (num_iterations, draft_tokens)


@pytest.mark.parametrize(("num_tokens", "num_undrafted"), [(3, 0), (4, 0), (5, 1), (7, 3)])
def test_iterations_without_drafts_are_added(num_tokens: int, num_undrafted: int) -> None:
    """The first token comes with the prompt, three more with the iteration that is reported."""
    request = record(outcomes=[(4, 2)], num_tokens=num_tokens)
    request.count_undrafted()
    assert request.outcomes == [(4, 2), *[(0, 0)] * num_undrafted]
    assert request.outcomes_in_order == (num_undrafted == 0)


def test_a_request_is_left_when_enough_has_arrived() -> None:
    assert record(token_ids=[1, 2], arrivals=[0.1], leave_after=2).has_enough
    assert record(arrivals=[0.1, 0.2], leave_after=2).has_enough
    assert not record(token_ids=[1], arrivals=[0.1], leave_after=2).has_enough
    assert not record(token_ids=[1, 2]).has_enough


def test_a_request_is_answered_cancelled_or_failed() -> None:
    cancelled, failed = (
        record(num_tokens=1, error=RequestError(code, "bad")) for code in (499, 500)
    )
    assert [each.answered for each in (record(num_tokens=1), record(), failed)] == [
        True,
        False,
        False,
    ]
    assert [each.was_left for each in (cancelled, failed, record())] == [True, False, False]
    assert str(failed.error) == "bad"
