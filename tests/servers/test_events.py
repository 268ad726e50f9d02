import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest

from echo_questions import TOKENIZER
from harness.config.errors import RunError
from harness.config.secrets import masked, note_key
from harness.engines.requests import RequestRecord
from harness.engines.tokenizer import TextTokenizer, Tokenizer
from harness.servers.events import (
    AnswerError,
    check_length,
    check_usage,
    note_event,
    note_reports,
    read_event,
    settle,
)
from harness.servers.http import events
from wording import mentions


def vllm(**counts: object) -> dict[str, Any]:
    told = {"num_draft_tokens": 8, "num_accepted_draft_tokens": 4}
    return {"metrics": {"speculative_decoding": told | counts}}


def test_what_cannot_be_is_refused() -> None:
    for event in [
        {"choices": ["text"]},
        {"choices": [{"token_ids": "abc"}]},
        {"choices": [{"token_ids": [True]}]},
        {"choices": [{"token_ids": [10**30]}]},
        {"usage": {"completion_tokens": -1}},
        {"__verbose": {"generation_settings": {"logit_bias": [{"bias": None, "token": "7"}]}}},
    ]:
        with pytest.raises(AnswerError) as refused:
            note_event(RequestRecord(0, 1), read_event(event), 0.1)
        assert len(str(refused.value)) < 150


def cut_off(reason: str) -> dict[str, Any]:
    """An answer that the server ended, not the model."""
    return {"choices": [{"index": 0, "text": "", "logprobs": None, "finish_reason": reason}]}


def test_a_reported_failure_is_one() -> None:
    for event, said, code in [
        ({"error": {"message": "out of memory", "type": "x", "param": None}}, "out of memory", 0),
        ({"error": "out of memory"}, "out of memory", 0),
        ({"error": {"message": None, "code": "x"}}, '{"message": null, "code": "x"}', 0),
        # vLLM refuses `min_p` beside speculation within a stream.
        ({"error": {"message": "not yet", "code": 400}}, "not yet", 400),
        ({"error": {"message": "not yet", "code": True}}, "not yet", 0),
        (cut_off("abort"), "the server ended the answer early: abort", 0),
        (cut_off("error"), "the server ended the answer early: error", 0),
        (cut_off("canceled"), "the server ended the answer early: canceled", 0),
    ]:
        with pytest.raises(RunError) as failure:
            read_event(event)
        assert str(failure.value) == said
        assert getattr(failure.value, "code", 0) == code


def test_an_empty_reason_ends_no_answer() -> None:
    # Text Generation Inference, before the last token.
    choice = {"index": 0, "text": " a", "logprobs": None, "finish_reason": ""}
    assert not read_event({"object": "text_completion", "choices": [choice]}).is_last
    assert read_event({"choices": [choice | {"finish_reason": "length"}]}).is_last


def reported(*events: dict[str, Any], num_tokens: int = 40, **fields: Any) -> RequestRecord:
    """The record of an answer whose server reports these counts."""
    request = RequestRecord(0, 5, num_tokens=num_tokens, **fields)
    reports = {name: value for event in events for name, value in event.items()}
    note_reports(request, reports, num_tokens)
    return request


CACHED = {"usage": {"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": 5000}}}


def steps(drafted: list[int], accepted: list[int], **counts: object) -> dict[str, Any]:
    return vllm(per_step_drafted=drafted, per_step_accepted=accepted, **counts)


def timings(drafted: int, accepted: int) -> dict[str, Any]:
    return {"timings": {"draft_n": drafted, "draft_n_accepted": accepted}}


def sglang(drafted: int, accepted: int, histogram: Sequence[int]) -> dict[str, Any]:
    names = {"spec_num_proposed_drafts": drafted, "spec_num_correct_drafts": accepted}
    return {"sglext": {"spec_tokens_details": names | {"spec_correct_drafts_histogram": histogram}}}


def test_totals_and_histograms_have_what_was_tested_where_drafts_are_equal() -> None:
    # Two drafts per iteration on average, and three accepted in one of them.
    counts = vllm(num_accepted_draft_tokens=3, acceptance_histogram=[3, 0, 0, 1])
    request = reported(counts)
    assert (request.as_drafts.proposed, request.as_drafts.accepted, request.as_drafts.tested) == (
        8,
        3,
        None,
    )
    counts = vllm(num_draft_tokens=12, acceptance_histogram=[1, 0, 2])
    usage = {"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": 3}}
    request = reported(counts, {"usage": usage})
    assert (request.as_drafts.tested, request.outcomes) == ([3, 2, 2, 0], [])
    assert (request.num_read, request.num_cached, request.impossible) == (5, 3, "")
    once = vllm(num_draft_tokens=4, num_accepted_draft_tokens=1, acceptance_histogram=[0, 1])
    assert reported(once).as_drafts.tested == [1, 1, 0, 0]
    totals = {"draft_n": 6, "draft_n_accepted": 3, "cache_n": 2, "prompt_ms": 7.5}  # llama.cpp's
    request = reported({"timings": totals})
    assert (request.outcomes, request.num_cached, request.prompt_ms) == ([], 2, 7.5)
    assert reported({"timings": {"draft_n": 9}}).drafts is None


def test_counts_that_cannot_be_are_left_out_and_named() -> None:
    for counts, words in [
        (vllm(num_accepted_draft_tokens=9), ["9 accepted of 8", "num_accepted_draft_tokens 9"]),
        (timings(8, 9), ["9 accepted of 8 draft tokens", "draft_n 8, draft_n_accepted 9"]),
        (steps([4, 4], [2]), ["2 iterations that drafted, and 1"]),
        (steps([4, 4], [0, 5]), ["5 accepted of 4 draft tokens"]),
        (steps([5000], [4], num_draft_tokens=5000), ["5000 draft"]),
        (vllm(num_draft_tokens=10**9, acceptance_histogram=[10**9]), ["4 accepted in all, and 0"]),
        # The total, and the iterations that contradict it.
        (vllm(num_accepted_draft_tokens=1, acceptance_histogram=[0, 0, 0, 0, 2]), ["histogram [0, 0, 0, 0, 2]"]),
        (sglang(8, 1, [0, 0, 0, 0, 2]), ["1 accepted in all, and 8", "spec_num_correct_drafts 1"]),
        (steps([4, 4], [4, 2], acceptance_histogram=[2]), ["4 accepted in all, and 6"]),
        (steps([4, 4], [3, 1], acceptance_histogram=[0, 0, 2]), ["draft token 2 in all, and 1 by"]),
        (steps([4, 3], [4, 0]), ["8 proposed in all, and 7 by"]),
        # More than an answer of 8 tokens and one iteration behind its end can hold.
        (timings(100, 100), ["92 tokens, and the answers have 8", "draft_n_accepted 100"]),
        (timings(2**31 - 1, 0), ["2147483647 draft tokens"]),
        (vllm(num_draft_tokens=80, num_accepted_draft_tokens=4, acceptance_histogram=[16, 4]), ["histogram [16, 4]"]),
        (CACHED, ["5000 of 5 prompt", "cached_tokens 5000, prompt_tokens 5"]),
        ({"timings": {"cache_n": 6}}, ["6 of 5 prompt tokens", "cache_n 6"]),
    ]:  # fmt: skip
        request = reported(counts, num_tokens=8)
        assert mentions(request.impossible, *words)
        assert len(request.impossible) < 400
        assert (request.drafts, request.outcomes, request.num_cached) == (None, [], None)
        both = request.as_drafts + reported(timings(8, 4)).as_drafts
        assert both.columns()["acceptance_rate"] is None


def test_counts_are_compared_with_what_was_asked_and_what_arrived() -> None:
    check_usage(8, answer(num_ids=8), 8)
    check_usage(8, answer(num_ids=7), 8)  # the token that ended the text
    check_usage(5, answer(), 8)  # special tokens alone
    for usage, num_ids, text in ((10_000_000, 8, ""), (3, 8, ""), (6, 3, ""), (0, 0, "text")):
        with pytest.raises(AnswerError):
            check_usage(usage, answer(num_ids=num_ids, text=text), 8)
    for sent in (answer(16), answer(shown_ids=[5] * 16), answer(logprobs=[0.5] * 16)):
        with pytest.raises(AnswerError, match="the server sent 16 tokens for max_tokens=8"):
            check_length(sent, 8)
    check_length(answer(8, text="a" * 8 * 2048), 8)
    with pytest.raises(AnswerError, match="the server sent 16,385 letters for max_tokens=8"):
        check_length(answer(text="a" * 16_385), 8)


@pytest.mark.parametrize("is_chat", [True, False, "auto"])
def test_ids_of_llama_cpp_are_tokens_unless_a_parser_holds_some_back(is_chat: object) -> None:
    request = answer(shown_ids=[5, 6], num_tokens=2, text="ab")
    tokenizer: Any = SimpleNamespace(encode=lambda text, **_: [7, 8, 9])
    settle(request, tokenizer, is_chat, may_be_empty=False)
    expected = ([7, 8, 9], True) if is_chat is True else ([5, 6], False)
    assert (request.token_ids, request.from_text) == expected


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


def test_an_answer_has_a_token_for_each_iteration_and_accepted_draft_token() -> None:
    for counts, least in [
        # Of 8 tokens seven come after the first: two iterations of four, of which three lie behind the end.
        (steps([4, 4], [3, 4], num_accepted_draft_tokens=7), 5),
        (vllm(acceptance_histogram=[0, 0, 0, 1, 1], num_accepted_draft_tokens=7), 5),
        # Nothing says what an iteration accepted: llama.cpp drafts no more than was asked for.
        (timings(1000, 136), 72),
        (timings(16, 16), 8),
        # Iterations whose draft tokens are no multiple of them.
        (vllm(num_draft_tokens=1000, num_accepted_draft_tokens=5, acceptance_histogram=[995, 5]), 1004),
    ]:  # fmt: skip
        assert reported(counts, num_tokens=least).impossible == ""
        assert mentions(
            reported(counts, num_tokens=least - 1).impossible, f"answers have {least - 1}"
        )


async def events_of(body: bytes | AsyncIterator[bytes]) -> list[Any]:
    request = httpx2.Request("POST", "http://localhost")
    return [event async for event in events(httpx2.Response(200, content=body, request=request))]


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("end", ["", "\n", "\r\n\r\n"])
def test_an_answer_without_a_stream_is_read_in_any_layout(indent: int | None, end: str) -> None:
    """Go's encoder, and so Ollama, ends it with a line end."""
    answer = {"choices": [{"text": "a\nb", "finish_reason": "stop"}]}
    body = json.dumps(answer, indent=indent) + end
    assert asyncio.run(events_of(body.encode())) == [answer]


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize(
    ("body", "found"),
    [
        (': ping\n\nevent: message\ndata: {"a": 1}\n\n: {\ndata: [DONE]\n\n', [{"a": 1}]),
        # The last one lacks its end.
        ('data: {"a": "é"}\n\ndata:{"b": 2}', [{"a": "é"}, {"b": 2}]),
        ('data: {"a":\ndata: "é"}\n\n', [{"a": "é"}]),
        ('data:\n\ndata: \n\n\n\ndata: {"a": 1}\n\n', [{"a": 1}]),
    ],
)
def test_events_are_read_however_cut(body: str, found: list[Any], end: str, size: int) -> None:
    data = body.replace("\n", end).encode()

    async def parts() -> AsyncIterator[bytes]:
        for first in range(0, len(data), size):
            yield data[first : first + size]

    assert asyncio.run(events_of(parts())) == found


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


@pytest.mark.parametrize("tokenizer", [TextTokenizer(), TOKENIZER])
def test_a_key_in_an_answer_is_masked_with_its_ids(tokenizer: Tokenizer) -> None:
    note_key("sk-s3cret")
    text = "my key is sk-s3cret"
    ids = tokenizer.encode(text)
    request = RequestRecord(0, 1, text=text, token_ids=ids, shown_ids=ids)
    settle(request, tokenizer, False, may_be_empty=True)
    assert request.text == tokenizer.decode(request.token_ids) == "my key is ***"
    assert (request.shown_ids, request.num_tokens) == ([], len(ids))


@pytest.mark.parametrize("key", ["x", "tiny", "EMPTY", "1234567"])
def test_a_word_in_place_of_a_key_is_not_masked(key: str) -> None:
    note_key(key)
    assert masked(f"exiting: {key}") == f"exiting: {key}"
