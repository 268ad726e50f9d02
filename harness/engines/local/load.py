"""`recovery load=8` with our own loop: different requests join and leave one running batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from harness.config.errors import SettingError
from harness.decoding.batch import Change, Records, Request
from harness.decoding.protocols import Iteration
from harness.engines.protocol import LoadRequest, Question
from harness.engines.requests import RequestRecord


def keep_in_flight(
    records: Records,
    request_of: Callable[[Question], Request],
    requests: Sequence[LoadRequest],
    num_in_flight: int,
) -> Iterator[RequestRecord]:
    """Answer requests in a loop of decoding that has begun with the first of them.

    The loop numbers its rows in the order in which they join, so that row 5 is `requests[5]`. The
    next requests join in the turn after others have ended.

    Args:
        records: of the loop.
        request_of: the loop's form of a question.
        num_in_flight: the requests that are answered together.

    Returns:
        A record for each request, as it ends.
    """
    parameters = [item for request in requests for item in request.parameters.items()]
    for name, value in parameters:
        raise SettingError(name, "needs engine=server", value)
    answers = [
        RequestRecord(place, len(request.question.prompts[0]), leave_after=request.leave_after)
        for place, request in enumerate(requests)
    ]
    running = {0}
    num_joined = 1
    record = next(records)
    while True:
        _note(record, answers)
        ended = [row for row in record.rows if _has_ended(answers[row], requests[row].question)]
        running.difference_update(ended)
        for row in ended:
            yield answers[row]
        room = num_in_flight - len(running)
        joining = range(num_joined, min(num_joined + room, len(requests)))
        num_joined += len(joining)
        running.update(joining)
        if not running:
            break
        joining_requests = [request_of(requests[row].question) for row in joining]
        record = records.send(Change(ended, joining_requests))
    records.close()


def _note(record: Iteration, answers: Sequence[RequestRecord]) -> None:
    """Add the tokens and outcomes of one turn to the answers of its rows."""
    for row, tokens, proposed, num_accepted in zip(
        record.rows, record.tokens, record.proposed, record.num_accepted, strict=True
    ):
        answer = answers[row]
        answer.token_ids += tokens
        answer.num_tokens += len(tokens)
        if proposed:
            answer.outcomes.append((len(proposed), num_accepted))


def _has_ended(answer: RequestRecord, question: Question) -> bool:
    is_stopped = answer.token_ids[-1] in question.stop_tokens
    is_full = answer.num_tokens >= question.decoding.max_new_tokens
    return is_stopped or is_full or answer.may_be_left
