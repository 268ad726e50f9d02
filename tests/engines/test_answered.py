"""What follows from an answer's times and from what an engine is prepared for, worked out by hand."""

from __future__ import annotations

import math

from harness.config.settings import DecodingSettings
from harness.engines.arrivals import Origin, origins
from harness.engines.counts import Counts, added
from harness.engines.door.plans import Machine, PassBytes
from harness.engines.door.reading import num_together
from harness.engines.protocol import Answered, BatchTimes, Wait, in_batches
from harness.engines.record import Preparation
from harness.engines.requests import RequestError, RequestRecord


def records(*num_tokens: int) -> list[RequestRecord]:
    """Requests 3, 4, ..., which took half a second each."""
    return [
        RequestRecord(3 + place, 1, seconds=0.5, num_tokens=number)
        for place, number in enumerate(num_tokens)
    ]


def test_a_batch_has_one_time_for_a_row_of_mean_length() -> None:
    batch = Answered(requests=records(6, 4), seconds=2.0, batch=BatchTimes(0.5, 2, 4))
    assert batch.ms_per_token == 400
    assert batch.waits == {3: Wait(2000, 5)}
    assert batch.decode_waits == {3: Wait(1500, 4)}
    assert batch.seconds_of(batch.requests[0]) == 2
    for numbers, waits in (((1, 1), {}), ((2, 1), {3: Wait(1000, 0.5)})):
        answered = Answered(requests=records(*numbers), seconds=2.0, batch=BatchTimes(1, 2, 1))
        assert answered.decode_waits == waits
    nothing = Answered(requests=records(0), seconds=2.0, batch=BatchTimes(2.0, 0, 0))
    assert (math.isnan(nothing.ms_per_token), nothing.waits) == (True, {})


def test_requests_that_were_sent_have_times_of_their_own() -> None:
    sent = Answered(requests=records(6, 4, 0, 5), seconds=2.0)
    sent.requests[3].error = RequestError(500, "bad")
    assert sent.waits == {3: Wait(500, 6), 4: Wait(500, 4)}
    assert (sent.decode_waits, sent.seconds_of(sent.requests[0])) == ({}, 0.5)
    assert list(map(list, in_batches([1, 2, 3], 2))) == [[1, 2], [3]]


def test_a_row_has_slots_for_prompt_answer_a_proposal_and_one_more() -> None:
    decoding = DecodingSettings(max_new_tokens=10, num_draft_tokens=3)
    preparation = Preparation(decoding=decoding, longest_prompt=20)
    assert preparation.demand.slots == 20 + 10 + 3 + 1


def test_tokens_of_an_iteration_come_from_draft_and_target() -> None:
    drafted = [Origin.DRAFT] * 2
    assert origins(0, 0, 1) == [Origin.TARGET]
    assert origins(4, 2, 3) == [*drafted, Origin.RECOVERED]
    assert origins(2, 2, 3) == [*drafted, Origin.BONUS]
    assert origins(4, 2, 1) == [Origin.DRAFT]


def test_a_plan_counts_bytes_and_gpus() -> None:
    passes = PassBytes(step=100, verification=120, drafting=40)
    assert passes.iteration_steps == 1.6
    assert Machine({0: 1, 1: 1, "cpu": 1}, "two", {}).num_gpus == 2
    assert [num_together(longest) for longest in (1, 2048, 4096, 20_000)] == [8, 8, 4, 1]


def test_counters_are_added_by_position() -> None:
    first = Counts(generated=3, accepted_at={0: 1}, running=5)
    both = added(first, Counts(drafts=2, accepted_at={0: 2, 1: 4}, running=7))
    assert both == Counts(generated=3, drafts=2, accepted_at={0: 3, 1: 4}, running=5)
