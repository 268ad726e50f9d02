import dataclasses
import time
from typing import Any

import pytest

from echo_questions import TOKENIZER, Open, arm_of, ask, changed, engine_of, texts, time_is_up_when
from echo_server import NEVER_DRAWN, EchoServer, serving
from harness.commands.recovery.scores import require_token_ids
from harness.config.errors import RunError, SettingError
from harness.engines.counts import Counts
from harness.engines.protocol import Answered, Chat, Question
from harness.engines.requests import Load, RequestError, RequestRecord
from harness.engines.timing import timed_answer
from harness.measuring.figures.requests import RequestFigures
from harness.measuring.quietness import Quietness
from harness.servers import connection, counters
from harness.servers.connection import RequestForm
from harness.servers.counters import CounterPage
from harness.servers.dialects import UNKNOWN_DIALECT
from harness.servers.sending import seconds_in_slots
from measured_runs import figures

TOOL = {"type": "function", "function": {"name": "weather"}}
ASKED = ({"role": "user", "content": "Rain?"}, {"role": "user", "content": "Snow?"})


def chatting(question: Question) -> Question:
    """The question with a message and a tool in each request."""
    requests = [
        dataclasses.replace(request, chat=Chat((message,), (TOOL,)))
        for request, message in zip(question.requests, ASKED, strict=False)
    ]
    return dataclasses.replace(question, requests=requests)


def counting(length_of_tools: int) -> EchoServer:
    """A server that reports ten tokens of every prompt, and so many more of one with tools."""

    def twist(event: Any) -> Any:
        if usage := event.get("usage"):
            usage["prompt_tokens"] = 10 + length_of_tools * ("tools" in server.bodies[-1])
        return event

    server = EchoServer(twist=twist)
    return server


def test_tools_are_sent_once_it_is_known_that_the_server_reads_them(open_engine: Open) -> None:
    server = counting(5)
    engine = open_engine(server, chat=True)
    question = chatting(ask(2))
    for _ in range(2):
        timed_answer(engine, engine.arms[0], question)
    with_tools, without, *asked = server.bodies
    assert with_tools["tools"] == [TOOL]
    assert "tools" not in without
    assert with_tools["messages"] == without["messages"]
    assert len(asked) == 4, "asked once about tools"
    assert all(body["tools"] == [TOOL] for body in asked)
    assert {body["messages"][0]["content"] for body in asked} == {"Rain?", "Snow?"}


def test_a_server_that_leaves_tools_out_is_refused(open_engine: Open) -> None:
    engine = open_engine(counting(0), chat=True)
    question = chatting(ask(2))
    shows_none = "prompts: have tools, and the chat template of the regular server shows none: http"
    with pytest.raises(SettingError, match=shows_none):
        timed_answer(engine, engine.arms[0], question)
    other = open_engine(counting(0), chat=True)
    requests = chatting(ask()).requests
    with pytest.raises(SettingError, match=shows_none):
        other.arms[0].answer(requests, 1)
    without = changed(ask(), chat=Chat(ASKED[:1]))
    assert timed_answer(other, other.arms[0], without).tokens


def test_a_strict_server_is_asked_for_all_but_details_of_its_answers(open_engine: Open) -> None:
    server = EchoServer(refuses=("return_token_ids", "return_spec_tokens_details"))
    engine = open_engine(server)
    timed_answer(engine, engine.arms[0], ask())
    (body,) = server.bodies
    assert {"prompt": [5, 6, 10], "top_k": 9, "ignore_eos": True}.items() <= body.items()


def test_a_server_that_refuses_its_salt_gets_none(open_engine: Open) -> None:
    server = EchoServer(version="1", refuses=("cache_salt",))
    engine = open_engine(server)
    assert not engine.arms[0].traits.salts
    question = changed(ask(top_k=0), salt="a")
    assert timed_answer(engine, engine.arms[0], question).requests[0].error is None
    other = EchoServer(version="1")
    engine = open_engine(other)
    assert engine.arms[0].traits.salts
    timed_answer(engine, engine.arms[0], question)
    assert other.bodies[-1]["top_k"] == -1


def llama_cpp(**behaviour: Any) -> EchoServer:
    return EchoServer(dialect="llama.cpp", version="b11549", **behaviour)


def test_llama_cpp_tells_token_ids_and_what_it_never_draws(open_engine: Open) -> None:
    server = llama_cpp()
    engine, question = open_engine(server), ask()
    assert engine.arms[0].traits.reports_token_ids
    assert engine.arms[0].traits.never_drawn == {NEVER_DRAWN}
    generation = timed_answer(engine, engine.arms[0], question)
    assert generation.tokens == texts(question)
    assert not generation.requests[0].from_text
    (body,) = server.bodies
    # As transformers has it: by default llama.cpp cuts by top-p before the temperature.
    assert body["samplers"] == ["penalties", "temperature", "top_k", "top_p", "min_p"]
    assert body["repeat_penalty"] == 1
    assert "repetition_penalty" not in body


def test_an_answer_without_all_its_token_ids_is_read_from_its_text(open_engine: Open) -> None:
    server = llama_cpp()
    engine = open_engine(server)
    server.withheld = 1
    generation = timed_answer(engine, engine.arms[0], ask())
    (request,) = generation.requests
    assert (request.from_text, request.num_tokens) == (True, 7)
    assert generation.tokens == [TOKENIZER.encode(request.text)]
    with pytest.raises(RunError, match="1 of 1 answers came without the ids of all"):
        require_token_ids(generation.requests)


# Of an answer of 30 tokens, when they came; each after 10 ms, all at the end, or late by a busy client.
STEADY = [0.5 + 0.01 * place for place in range(30)]
AT_THE_END = [0.8 + 0.0001 * place for place in range(30)]
LATE = [0.5 + 0.04 * (place // 4) + 0.00001 * place for place in range(30)]


@pytest.mark.parametrize(
    ("arrivals", "outcomes", "share", "held_back"),
    [
        (STEADY, [], 1.0, False),
        (AT_THE_END, [], 1.0, True),
        (AT_THE_END[:1], [], 1.0, True),
        (STEADY[::2], [], 1.0, True),
        (LATE, [], 1.0, True),
        # Nothing is known of what the server did, and a busy client merges no events.
        (LATE, [], 0.5, None),
        # A proxy gave all at the end.
        (AT_THE_END, [], 0.5, True),
        (STEADY[::2], [], 0.5, True),
        # An iteration yields three tokens, which may come one by one.
        (STEADY[::3], [(4, 2)] * 10, 1.0, False),
        (STEADY[::5], [(4, 2)] * 10, 1.0, True),
        (AT_THE_END, [(4, 2)] * 10, 1.0, True),
        (AT_THE_END[::3], [(4, 2)] * 10, 1.0, True),
    ],
)
def test_more_tokens_at_once_than_an_iteration_yields_were_held_back(
    arrivals: list[float], outcomes: list[tuple[int, int]], share: float, held_back: bool | None
) -> None:
    answer = RequestRecord(0, 3, arrivals=arrivals, seconds=0.81, num_tokens=30, outcomes=outcomes)
    quietness = type("Known", (Quietness,), {"columns": {"processor_share": share}})(())
    answered = Answered(requests=[answer] * 3, seconds=0.81)
    found = figures(RequestFigures, [answered], quietness=quietness)
    assert found.held_back == held_back
    assert (found.time_per_output_token_p50_ms is None) == bool(held_back)
    if held_back is None:
        assert found.inter_token_latency_p50_ms is None
    # Of the whole answer.
    has_first = found.time_to_first_token_p50_ms is not None
    assert has_first == (arrivals[0] != AT_THE_END[0])


def test_an_unknown_yield_is_below_the_whole_answer() -> None:
    regular = RequestRecord(0, 3, arrivals=STEADY, seconds=0.81, num_tokens=30)
    for arrivals, num_tokens, held_back in (
        (STEADY[::15], 30, False),
        (AT_THE_END, 30, True),
        # A single token has no other to arrive with.
        (AT_THE_END[:1], 1, False),
    ):
        answer = dataclasses.replace(regular, arrivals=arrivals, num_tokens=num_tokens)
        arms = [[Answered(requests=[each], seconds=0.81)] for each in (regular, answer)]
        assert figures(RequestFigures, *arms).held_back == held_back


def test_requests_are_counted() -> None:
    failures = [RequestRecord(0, 3, error=RequestError(code, "")) for code in (408, 500)]
    answered = [RequestRecord(1, 3, arrivals=[0.1], seconds=0.4, num_tokens=1)] * 36
    load = Load(seconds=10.0, request_seconds=30.0, share=0.5)
    lap = Answered(requests=[*failures, *answered], seconds=5.0, load=load)
    found = figures(RequestFigures, [lap])
    assert found.num_failed == 2
    assert found.requests_per_second == 36 / 5
    assert found.mean_in_flight == 3


@pytest.mark.parametrize("dialect", ["llama.cpp", "openai", "vllm"])
def test_servers_that_know_no_tokens_to_stop_at_get_texts(open_engine: Open, dialect: str) -> None:
    server = EchoServer(dialect=dialect, version="1")
    engine = open_engine(server)
    question = changed(ask(top_k=0), ends=("m", "no", "o", "p", "q"))
    timed_answer(engine, engine.arms[0], question)
    (body,) = server.bodies
    # OpenAI's API takes four.
    expected = None if dialect == "vllm" else ["m", "no", "o", "p"]
    assert body.get("stop") == expected


@pytest.mark.parametrize("dialect", ["vllm", "sglang", "openai"])
def test_an_answer_has_what_arrived(open_engine: Open, dialect: str) -> None:
    """Tokens as their ids came, or all of a text at its end."""
    engine, question = open_engine(EchoServer(delay_s=0.01, dialect=dialect)), ask(4, top_k=0)
    answered = timed_answer(engine, engine.arms[0], question)
    shown: dict[int, list[int]] = {row: [] for row in range(4)}
    for arrival in answered.arrivals:
        shown[arrival.row] += arrival.tokens
        assert 0 < arrival.seconds <= answered.requests[arrival.row].seconds
    assert [shown[row] for row in range(4)] == answered.tokens
    assert len(answered.arrivals) == (28 if dialect == "vllm" else 4)
    for request, tokens in zip(answered.requests, answered.tokens, strict=True):
        assert len(request.text) == request.num_tokens == len(request.arrivals) == 7
        assert dialect == "vllm" or tokens == TOKENIZER.encode(request.text)
        assert request.time_to_first_token_ms < 1000 * request.seconds


def test_the_load_is_kept_up_until_the_last_answer(open_engine: Open) -> None:
    """Of four requests, three at a time, the last one alone would run alone."""
    server = EchoServer(delay_s=0.03)
    engine = open_engine(server)
    three = dataclasses.replace(ask(4), in_flight=3)
    timed_answer(engine, engine.arms[0], three)
    assert (len(server.bodies), server.num_abandoned) == (4, 0)
    accompanied = dataclasses.replace(three, extra=ask(3).requests)
    generation = timed_answer(engine, engine.arms[0], accompanied)
    assert generation.tokens == texts(accompanied)
    load = generation.load
    assert server.most_in_flight == 3
    # They do not count, and are cancelled when the last one that does has ended.
    assert len(generation.requests) == 4
    assert len(load.extra) >= len(server.bodies) - 8 >= 2
    assert {request.error.code for request in load.extra if request.error} == {499}
    assert 0 < generation.seconds < load.seconds < load.request_seconds <= 3 * load.seconds


def test_a_request_beyond_the_slots_waits() -> None:
    periods = [(0.0, 2.0), (0.0, 3.0), (1.0, 4.0)]
    # With two slots, one of three waits from 1 s to 2 s.
    assert [seconds_in_slots(periods, slots) for slots in (1, 2, 3)] == [4.0, 7.0, 8.0]


def test_a_few_per_cent_of_failures_lose_no_request(open_engine: Open) -> None:
    server = EchoServer(fail_every=40, break_every=28)
    engine, question = open_engine(server, batch_size=64), ask(120, max_new_tokens=3)
    generation = timed_answer(engine, engine.arms[0], question, allow_failures=True)
    requests = arm_of(engine).requests
    assert len(generation.tokens) == len(server.bodies) == 120
    assert [request.index for request in requests] == list(range(120))
    failed = [request for request in requests if request.error is not None]
    assert sorted(request.error.code for request in failed if request.error) == [0] * 4 + [500] * 3
    for expected, request in zip(texts(question), requests, strict=True):
        assert request.error is not None or request.token_ids == expected
    assert {(len(request.token_ids)) for request in failed} == {0, 2}


def test_a_request_that_takes_too_long_is_a_time_out(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = EchoServer()
    engine = open_engine(server, timeout_s=300, batch_size=2)
    server.stall = True
    asked = time_is_up_when(
        lambda: all(one.token_ids for one in arm_of(engine).requests), monkeypatch
    )
    with pytest.raises(RunError, match=r"Timeout: no end after 300 s"):
        timed_answer(engine, engine.arms[0], ask(2))
    assert asked.count(300) == 2
    requests = arm_of(engine).requests
    assert [(one.error.code, len(one.token_ids)) for one in requests if one.error] == [(408, 1)] * 2
    assert all(one.seconds > 0 for one in requests)


def test_requests_that_nobody_reads_are_cancelled(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = EchoServer()
    engine = open_engine(server)
    server.stall = True

    monkeypatch.setattr("harness.servers.engine.QUIET_S", 0.01)

    def leave(num_ended: int) -> None:
        assert num_ended == 0
        if all(one.token_ids for one in arm_of(engine).requests):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.arms[0].answer(ask(2).requests, 2, note_ended=leave)
    # The server may notice it first.
    while server.num_abandoned < 2 or not all(one.was_left for one in arm_of(engine).requests):
        time.sleep(0.01)


def test_the_key_comes_from_the_environment_and_goes_nowhere_else(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THE_KEY", "sk-s3cret")
    server = EchoServer(key="sk-s3cret")
    engine = open_engine(server, api_key_variable="THE_KEY")
    assert timed_answer(engine, engine.arms[0], ask()).tokens == texts(ask())
    server.key = "another"
    with pytest.raises(RunError, match=r"wrong key bearer \*\*\*"):
        timed_answer(engine, engine.arms[0], ask())
    assert "s3cret" not in str(arm_of(engine).requests)
    with pytest.raises(SettingError, match=r"engine.api_key_variable=NO_KEY"):
        open_engine(server, api_key_variable="NO_KEY")
    for key, why in (("sk-s3cret\r", "a line break"), ("sk-s\xe9cret", "not ASCII")):
        monkeypatch.setenv("THE_KEY", key)
        with pytest.raises(SettingError, match=why) as refused:
            open_engine(server, api_key_variable="THE_KEY")
        assert "cret" not in str(refused.value)


def test_a_server_that_does_not_answer_is_named() -> None:
    with pytest.raises(
        RunError, match=r"engine.url: nothing answers at http://127.0.0.1:9/v1/ .*running\?$"
    ):
        engine_of(url="http://127.0.0.1:9/v1")
    # Beside one whose name for the model is another: nothing is known of the weights of the one that is down.
    listed = EchoServer(dialect="llama.cpp", models={"tiny.gguf": None})
    with serving(listed) as regular_url, pytest.raises(RunError, match="url: nothing answers at"):
        engine_of(regular_url=regular_url, url="http://127.0.0.1:9/v1")


def test_requests_under_load_differ_and_are_left_midway(open_engine: Open) -> None:
    server = EchoServer(delay_s=0.01)
    arm = arm_of(open_engine(server))
    [whole] = ask().requests
    whole = dataclasses.replace(whole, with_logprobs=True)
    [left] = ask(max_new_tokens=60, temperature=1.0).requests
    left = dataclasses.replace(left, leave_after=3)
    records = arm.answer([whole, left, whole, left, whole], 2).requests
    assert [record.error for record in records] == [None] * 5
    assert [record.token_ids for record in records[::2]] == texts(ask()) * 3
    for record in records[1::2]:
        assert 3 <= len(record.token_ids) < 60
    by_length = {body["max_tokens"]: body for body in server.bodies}
    assert by_length[7]["logprobs"] == 1
    assert "logprobs" not in by_length[60]
    assert by_length[60]["temperature"] == 1.0


def test_a_server_that_answers_others_is_waited_for(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it has no more requests, or says that it always has some."""
    engine = open_engine(EchoServer())
    arm = arm_of(engine)
    running = iter([2.0, 1.0, 0.0, 0.0])
    monkeypatch.setattr(CounterPage, "read", lambda page: Counts(running=next(running)))
    timed_answer(engine, arm, ask(1))
    assert next(running, None) is None

    said: list[str] = []
    engine.say = said.append
    monkeypatch.setattr(counters, "_MOST_DRAINING_S", 0.1)
    monkeypatch.setattr(CounterPage, "read", lambda page: Counts(running=3.0))
    for _ in range(2):
        assert timed_answer(engine, arm, ask(1)).counted == Counts(running=3.0)
    assert said == ["regular: the server is still answering 3 requests of others"]


def test_growth_between_questions_is_that_of_other_clients(open_engine: Open) -> None:
    engine = open_engine(EchoServer(metrics=True))
    arm = arm_of(engine)
    timed_answer(engine, arm, ask(2))
    # Another client, whose first request asks for a few tokens.
    engine_of(url=arm.url).close()
    timed_answer(engine, arm, ask(1))
    between = arm.between_questions()
    assert between is not None
    assert between.generated == connection._PROBE_TOKENS
    # Each arm is another client of a server that both ask.
    with serving(EchoServer(metrics=True)) as url:
        engine = engine_of(url=url, regular_url=url)
        assert arm_of(engine).between_questions() is None
        engine.close()


def test_a_request_that_timed_out_is_not_of_others(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = EchoServer()
    engine = open_engine(server)
    server.stall = True
    time_is_up_when(lambda: server.in_flight > 0, monkeypatch)
    timed_answer(engine, arm_of(engine), ask(1), allow_failures=True)
    said: list[str] = []
    engine.say = said.append
    monkeypatch.setattr(counters, "_MOST_DRAINING_S", 0.1)
    monkeypatch.setattr(CounterPage, "read", lambda page: Counts(running=1.0))
    answered = timed_answer(engine, arm_of(engine), ask(1), allow_failures=True)
    assert answered.counted == Counts(running=0.0)
    assert said == ["regular: the server is still answering 1 request of this run"]


def test_a_server_that_refuses_a_top_p_of_1_does_not_get_it() -> None:
    # Text Generation Inference: "`top_p` must be > 0.0 and < 1.0", with status 422.
    form = RequestForm(TOKENIZER, "tiny", UNKNOWN_DIALECT, False, False, False)
    assert "top_p" not in form.body(ask(top_k=0).requests[0])
    assert form.body(ask(top_k=0, top_p=0.9).requests[0])["top_p"] == 0.9
    [request] = changed(ask(top_k=0), prompt=[5, 6]).requests
    assert form.body(request)["prompt"] == TOKENIZER.decode([5, 6])
