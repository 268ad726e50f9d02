from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import httpx2
import pytest

from harness.config.errors import RunError
from harness.engines.requests import RequestRecord
from harness.servers.events import (
    AnswerError,
    check_drafts,
    check_length,
    check_usage,
    note_event,
    read_event,
)
from harness.servers.http import events


def vllm(**counts: object) -> dict[str, Any]:
    told = {"num_draft_tokens": 8, "num_accepted_draft_tokens": 4}
    return {"metrics": {"speculative_decoding": told | counts}}


@pytest.mark.parametrize(
    "event",
    [
        {"choices": ["text"]},
        {"choices": [{"token_ids": "abc"}]},
        {"choices": [{"token_ids": [True]}]},
        {"choices": [{"token_ids": [10**30]}]},
        {"usage": {"completion_tokens": -1}},
        vllm(num_accepted_draft_tokens=9),
        vllm(per_step_drafted=[4, 4], per_step_accepted=[2]),
        vllm(per_step_drafted=[4, 4], per_step_accepted=[0, 5]),
        vllm(per_step_drafted=[10**9], per_step_accepted=[0]),
        vllm(num_draft_tokens=10**9, acceptance_histogram=[10**9]),
        {"__verbose": {"generation_settings": {"logit_bias": [{"bias": None, "token": "7"}]}}},
    ],
)
def test_what_cannot_be_is_refused(event: Any) -> None:
    with pytest.raises(AnswerError) as refused:
        note_event(RequestRecord(0, 1), read_event(event), 0.1)
    assert len(str(refused.value)) < 150


def test_a_reported_failure_is_one() -> None:
    for error in ({"message": "out of memory", "type": "x", "param": None}, "out of memory"):
        with pytest.raises(RunError, match=r"^out of memory$"):
            read_event({"error": error})


@pytest.mark.parametrize(("code", "known"), [(400, 400), (None, 0), ("bad", 0), (True, 0)])
def test_a_refusal_within_a_stream_has_its_status(code: object, known: int) -> None:
    """vLLM sends one when it refuses `min_p` beside speculation."""
    with pytest.raises(RunError, match=r"^not yet supported$") as failure:
        read_event({"error": {"message": "not yet supported", "code": code}})
    assert getattr(failure.value, "code", 0) == known


@pytest.mark.parametrize("reason", ["abort", "error", "canceled"])
def test_an_answer_that_the_server_cut_off_is_no_whole_one(reason: str) -> None:
    choice = {"index": 0, "text": "", "logprobs": None, "finish_reason": reason}
    with pytest.raises(RunError, match=f"^the server ended the answer early: {reason}$"):
        read_event({"object": "text_completion", "choices": [choice]})


def test_an_empty_reason_ends_no_answer() -> None:
    # Text Generation Inference, before the last token.
    choice = {"index": 0, "text": " a", "logprobs": None, "finish_reason": ""}
    assert not read_event({"object": "text_completion", "choices": [choice]}).is_last
    assert read_event({"choices": [choice | {"finish_reason": "length"}]}).is_last


def test_iterations_that_drafted_different_numbers_are_not_made_equal() -> None:
    # Two drafts per iteration on average, and three accepted in one of them.
    request = RequestRecord(0, 1)
    event = read_event(vllm(num_draft_tokens=8, acceptance_histogram=[3, 0, 0, 1]))
    note_event(request, event, 0.1)
    assert (request.num_drafted, request.num_accepted, request.outcomes) == (8, 4, [])


def test_a_histogram_of_equal_drafts_has_the_outcome_of_each_iteration() -> None:
    request = RequestRecord(0, 1)
    counts = vllm(num_draft_tokens=12, acceptance_histogram=[1, 0, 2])
    usage = {"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": 3}}
    note_event(request, read_event(counts | {"usage": usage}), 0.1)
    # A later event without these counts changes nothing.
    note_event(request, read_event({"choices": [{"text": "a"}]}), 0.2)
    assert request.outcomes == [(4, 0), (4, 2), (4, 2)]
    assert (request.num_read, request.num_cached) == (5, 3)
    once = vllm(num_draft_tokens=4, num_accepted_draft_tokens=1, acceptance_histogram=[0, 1])
    totals = {"draft_n": 6, "draft_n_accepted": 3, "cache_n": 2, "prompt_ms": 7.5}  # llama.cpp's
    for counts, outcomes in (
        (once, [(4, 1)]),
        ({"timings": totals}, []),
    ):
        note_event(request, read_event(counts), 0.3)
        assert request.outcomes == outcomes
    assert (request.num_cached, request.prompt_ms) == (2, 7.5)


def test_openais_words_for_draft_tokens_count_where_a_gateway_fills_them() -> None:
    details = {"accepted_prediction_tokens": 10, "rejected_prediction_tokens": 119}
    request = RequestRecord(0, 1)
    note_event(request, read_event({"usage": {"completion_tokens_details": details}}), 0.1)
    assert (request.num_drafted, request.num_accepted) == (129, 10)
    rejected = {"completion_tokens_details": {"rejected_prediction_tokens": 7}}
    note_event(request, read_event({"usage": rejected}), 0.2)
    assert (request.num_drafted, request.num_accepted) == (7, 0)
    note_event(request, read_event({"timings": {"draft_n": 9}}), 0.3)
    assert request.num_drafted == 7, "how many were accepted is unknown"


def test_counts_are_compared_with_what_was_asked_and_what_arrived() -> None:
    check_length(8, 8)
    check_usage(8, answer(num_ids=8), 8)
    check_usage(8, answer(num_ids=7), 8)  # the token that ended the text
    check_usage(5, answer(), 8)  # special tokens alone
    for usage, num_ids, text in ((10_000_000, 8, ""), (3, 8, ""), (6, 3, ""), (0, 0, "text")):
        with pytest.raises(AnswerError):
            check_usage(usage, answer(num_ids=num_ids, text=text), 8)
    with pytest.raises(AnswerError, match="the server sent 16 tokens for max_tokens=8"):
        check_length(16, 8)


def answer(num_ids: int = 0, arrivals: Sequence[float] = (), **fields: Any) -> RequestRecord:
    return RequestRecord(0, 1, token_ids=[5] * num_ids, arrivals=[*arrivals], **fields)


def test_fewer_tokens_than_bursts_of_text_are_no_count() -> None:
    """Text that is divided at one moment is one burst, and a parser may divide a little more."""
    times = [0.01 * place for place in range(32)]
    with pytest.raises(AnswerError, match="counts 16 tokens and sent text 32 times"):
        check_usage(16, answer(text="a" * 32, arrivals=times, num_tokens=16), 64)
    check_usage(28, answer(text="a" * 32, arrivals=times, num_tokens=28), 64)
    letters = sorted(time + 1e-5 * letter for time in times for letter in range(4))
    check_usage(32, answer(text="a" * 128, arrivals=letters, num_tokens=32), 64)


@pytest.mark.parametrize(
    ("counts", "most"),
    [
        # Of 8 tokens seven come after the first: two iterations of four, of which three lie behind the end.
        (vllm(per_step_drafted=[4, 4], per_step_accepted=[3, 4], num_accepted_draft_tokens=7), 5),
        (vllm(num_draft_tokens=8, acceptance_histogram=[0, 0, 0, 1, 1], num_accepted_draft_tokens=7), 5),
        # Nothing says what an iteration accepted.
        (vllm(num_draft_tokens=1000, num_accepted_draft_tokens=136), 8),
        ({"timings": {"draft_n": 1000, "draft_n_accepted": 136}}, 8),
        ({"usage": {"completion_tokens_details": {"accepted_prediction_tokens": 136}}}, 8),
        # 1,048,575 iterations, whose draft tokens are no multiple of them.
        (vllm(num_draft_tokens=1048576, acceptance_histogram=[1048570, 5]), 1048578),
    ],
)  # fmt: skip
def test_an_answer_has_a_token_for_each_iteration_and_accepted_draft_token(
    counts: dict[str, Any], most: int
) -> None:
    request = RequestRecord(0, 1)
    note_event(request, read_event(counts), 0.1)
    check_drafts(request, most)
    with pytest.raises(AnswerError, match=f"make {most} tokens, and its answer has {most - 1}"):
        check_drafts(request, most - 1)


async def events_of(body: bytes) -> list[Any]:
    return [event async for event in events(httpx2.Response(200, content=body))]


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("end", ["", "\n", "\r\n\r\n"])
def test_an_answer_without_a_stream_is_read_in_any_layout(indent: int | None, end: str) -> None:
    """Go's encoder, and so Ollama, ends it with a line end."""
    answer = {"choices": [{"text": "a\nb", "finish_reason": "stop"}]}
    body = json.dumps(answer, indent=indent) + end
    assert asyncio.run(events_of(body.encode())) == [answer]


def test_comments_between_events_are_none() -> None:
    body = b': ping\n\nevent: message\ndata: {"a": 1}\n\n: {\ndata: [DONE]\n\n'
    assert asyncio.run(events_of(body)) == [{"a": 1}]


@pytest.mark.parametrize("part", ["delta", "message"])
def test_calls_of_tools_are_text_that_arrived(part: str) -> None:
    """Of llama.cpp in events, and of any server that streams nothing: their arguments are tokens as others are."""
    request = RequestRecord(0, 1)
    added: list[dict[str, Any]] = [
        {"role": "assistant", "content": None},
        {"content": "I count: "},
        {"tool_calls": [{"index": 0, "id": "a", "function": {"name": "sum", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"of": '}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "[1, 2]}"}}]},
        {"tool_calls": [{"index": 1, "function": None}]},
    ]
    for place, one in enumerate(added):
        note_event(request, read_event({"choices": [{"index": 0, part: one}]}), float(place))
    assert request.text == 'I count: sum{"of": [1, 2]}'
    assert request.arrivals == [1.0, 2.0, 3.0, 4.0]
