"""Servers that lie, break off, fall silent, or answer with nothing that can be read."""

import asyncio
import contextlib
import dataclasses
import gzip
import os
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest

from echo_questions import TOKENIZER, Open, arm_of, ask, engine_of, texts, time_is_up_when
from echo_server import EchoServer, serving
from harness.config.errors import RunError, SettingError
from harness.engines.protocol import Answered
from harness.engines.requests import RequestRecord
from harness.engines.timing import timed_answer
from harness.servers import engine as server_module
from harness.servers import http
from harness.servers.dialects import DIALECTS
from harness.servers.identity import AskedServer, ListedModel, server_report
from harness.servers.logprobs import TextScorer
from harness.servers.sending import Outgoing, Sender
from harness.servers.settings import ServerSettings
from wording import mentions


def answered(engine: Any, count: int = 3) -> Answered:
    return timed_answer(engine, engine.arms[0], ask(count), allow_failures=True)


NINE = {"usage": {"completion_tokens": 9}}
SECOND_CHOICE = {"choices": [{"index": 1, "text": "b"}]}
EMPTY_END = {"choices": [{"text": "", "finish_reason": "stop"}]}


def without_a_reason(event: Any) -> Any:
    for choice in event["choices"] if event else ():
        choice["finish_reason"] = None
    return event


@pytest.mark.parametrize(
    ("twist", "error"),
    [
        (lambda event: event | NINE if event and "usage" in event else event, "counts 9 tokens for max_tokens=7"),
        (lambda event: event and event | SECOND_CHOICE, "sent choice 1, and one answer was asked for"),
        (lambda event: event and EMPTY_END, "the answer has no token"),
        (without_a_reason, "the answer ended without a finish_reason"),
    ],
)  # fmt: skip
def test_an_impossible_answer_fails_its_request(open_engine: Open, twist: Any, error: str) -> None:
    """What else cannot be is in test_events.py."""
    server = EchoServer()
    engine = open_engine(server)
    server.twist = twist
    requests = answered(engine).requests
    assert all(str(request.error).endswith(error) for request in requests)


def test_a_server_that_is_busy_is_named(open_engine: Open) -> None:
    server = EchoServer()
    engine = open_engine(server)
    server.is_busy = True
    assert {request.error.code for request in answered(engine).requests} == {429}
    with pytest.raises(RunError, match=r"engine.url=.*429"):
        open_engine(server)


def test_a_line_that_is_no_json_is_shown() -> None:
    def answer(request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(200, stream=httpx2.ByteStream(b"data: {oops\x1b[2J: 1}\n\n"))

    async def sent(request: RequestRecord) -> None:
        transport = httpx2.MockTransport(answer)
        async with httpx2.AsyncClient(transport=transport, base_url="http://a") as client:
            sender = Sender(client, TOKENIZER, ServerSettings(name="server", url="http://a"))
            await sender.send(Outgoing({"max_tokens": 7}, request))

    request = RequestRecord(0, 1)
    asyncio.run(sent(request))
    said = str(request.error)
    assert mentions(said, "JSONDecodeError: Expecting", "line 1 column 2", "{oops: 1}")


def test_a_connection_that_the_server_had_closed_is_tried_again_once(open_engine: Open) -> None:
    server = EchoServer(drop_reused=True)
    engine = open_engine(server)
    question = dataclasses.replace(ask(3), in_flight=1)
    generation = timed_answer(engine, engine.arms[0], question)
    assert generation.tokens == texts(question)
    assert server.num_dropped == 3
    server.die_after = 1
    server.bodies.clear()
    with pytest.raises(RunError, match="1 of 2 requests failed"):
        timed_answer(engine, engine.arms[0], dataclasses.replace(ask(2), in_flight=1))
    # The one that failed was sent twice, and not a third time.
    assert len(server.bodies) <= 3


def test_a_connection_that_is_new_is_not_tried_again(open_engine: Open) -> None:
    """A server that dies does not get the request that it died of twice."""
    server = EchoServer()
    engine = open_engine(server, batch_size=2)
    server.drop_new = True
    # One of two requests in flight has the connection that opening the engine left.
    generation = timed_answer(engine, engine.arms[0], ask(2), allow_failures=True)
    (error,) = (request.error for request in generation.requests if request.error)
    assert mentions(str(error), "closed the connection without an answer")
    assert server.num_dropped == 1


@pytest.mark.parametrize("in_flight", [1, 3])
def test_a_server_that_is_gone_gets_few_more_requests(open_engine: Open, in_flight: int) -> None:
    server = EchoServer()
    engine = open_engine(server)
    server.die_after = 4
    question = dataclasses.replace(ask(40), in_flight=in_flight)
    generation = timed_answer(engine, engine.arms[0], question, allow_failures=True)
    errors = [request.error for request in generation.requests if request.error is not None]
    assert len(errors) == 40 - 4
    num_sent = sum(not str(error).endswith("no more are sent") for error in errors)
    assert 5 <= num_sent <= 4 + 2 * in_flight
    given_up = engine.arms[0].failure
    assert given_up is not None
    assert mentions(given_up, "requests in a row got no answer", "closed the connection")
    # At the next question, too.
    assert not answered(engine, 2).requests[0].answered
    assert len(server.bodies) <= 4 + num_sent * 2


def test_a_server_that_refuses_every_request_is_asked_on(open_engine: Open) -> None:
    """What it says is cut, and steers no terminal."""
    server = EchoServer()
    engine = open_engine(server)
    server.fail_every = 1
    server.error_text = "\x1b[2J\x1b]0;title\x07" + "\u202eno\n" * 50_000
    errors = [request.error for request in answered(engine, 12).requests]
    assert {error.code for error in errors if error is not None} == {500}
    assert len(server.bodies) == 12
    message = str(errors[0])
    assert len(message) < 400
    assert message.isprintable()
    assert message.endswith(" characters)"), "how long it was"


def test_a_chat_without_a_template_is_told_apart_from_other_failures(open_engine: Open) -> None:
    """`transformers serve` answers with status 500 and no reason."""
    with pytest.raises(RunError, match=r"engine.url=.*told to fail.*\n.*engine.chat=false"):
        open_engine(EchoServer(fail_every=1), chat=True)


def test_an_address_without_v1_is_told_so() -> None:
    """llama.cpp answers there in a form of its own, without a finish_reason."""
    server = EchoServer(twist=without_a_reason)
    with serving(server) as url, pytest.raises(RunError) as error:
        engine_of(url=url.removesuffix("/v1"))
    assert mentions(str(error.value), "without a finish_reason", "addresses end in /v1")
    with serving(server) as url, pytest.raises(RunError, match=f"end in /v1: {url}$"):
        engine_of(url=url.replace("/v1", "/v2"))


def test_silence_is_said(open_engine: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "QUIET_S", 0.1)
    server = EchoServer()
    engine = open_engine(server, timeout_s=300)
    server.stall = True
    said: list[str] = []
    engine.say = said.append
    time_is_up_when(lambda: bool(said), monkeypatch)
    (request,) = answered(engine, 1).requests
    assert request.error.code == 408
    assert "regular: nothing from http://127.0.0.1" in said[0]
    assert mentions(said[0], "0 of 1 requests", "engine.timeout_s=300")


@pytest.mark.parametrize(
    ("content", "encoding"), [(b"[" * 200_000, "identity"), (b"no gzip", "gzip")]
)
def test_log_probabilities_that_cannot_be_read_are_one_line(
    open_engine: Open, content: bytes, encoding: str
) -> None:
    arm = arm_of(open_engine(EchoServer(version="1")))

    def answer(request: httpx2.Request) -> httpx2.Response:
        stream = httpx2.ByteStream(content)
        return httpx2.Response(200, headers={"Content-Encoding": encoding}, stream=stream)

    transport = httpx2.MockTransport(answer)
    arm.connection.client = httpx2.AsyncClient(transport=transport, base_url="http://localhost")
    with pytest.raises(RunError, match="log-probabilities of a text"):
        arm.scores([([5], [6])], 5, 1)


def test_a_server_that_sends_on_to_another_is_refused(open_engine: Open) -> None:
    """Its prompts may be private, and the row would name a server that was not measured."""
    server, other = EchoServer(), EchoServer()
    engine = open_engine(server)
    with serving(other) as elsewhere:
        server.redirect = elsewhere
        (request,) = answered(engine, 1).requests
    assert mentions(str(request.error), "redirects to", elsewhere, "another server")
    assert not other.bodies


def endless(data: bytes, status: int) -> tuple[httpx2.AsyncClient, list[int]]:
    """A client of a server that repeats these bytes without end, and how many of them came."""
    num_bytes = [0]

    async def repeated() -> AsyncIterator[bytes]:
        while num_bytes[0] < 300_000_000:
            num_bytes[0] += len(data)
            yield data

    class Body(httpx2.AsyncByteStream):
        def __aiter__(self) -> AsyncIterator[bytes]:
            return repeated()

    def answer(request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(status, stream=Body())

    transport = httpx2.MockTransport(answer)
    return httpx2.AsyncClient(transport=transport, base_url="http://localhost"), num_bytes


def error_of(client: httpx2.AsyncClient) -> str:
    async def read() -> None:
        async with http.answer_to(client, "completions", {}) as response:
            async for _ in http.events(response):
                pass

    with pytest.raises(RunError) as failed:
        asyncio.run(read())
    return str(failed.value)


@pytest.mark.parametrize(
    ("status", "data", "most", "error"),
    [
        (200, b"data: " + b"x" * 65_536, 65_000_000, "event exceeded the 64000000 byte limit"),
        (200, b": " + b"x" * 65_536 + b"\n", 2**21, "the answer has more than 1,048,576 bytes"),
        (200, b"{" * 65_536, 65_000_000, "the answer has more than 64,000,000 bytes"),
        (500, b"E" * 1_000_000, 4_000_000, "500 Internal Server Error: EEE"),
    ],
)
def test_an_answer_without_an_end_is_refused(
    monkeypatch: pytest.MonkeyPatch, status: int, data: bytes, most: int, error: str
) -> None:
    """Reading takes no time that grows with the square of its length."""
    if most < 2**22:
        monkeypatch.setattr(http, "_MOST_OF_ANSWER", 2**20)
    client, num_bytes = endless(data, status)
    assert error in error_of(client)
    assert num_bytes[0] <= most


def drip(first: bytes) -> Any:
    """Serve a beginning, and a byte of a page or a head now and then, without an end."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(first)
        with contextlib.suppress(ConnectionError):
            while not reader.at_eof():
                writer.write(b" ")
                await writer.drain()
                await asyncio.sleep(0.01)
        writer.close()

    return SimpleNamespace(serve=serve)


HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n"


@pytest.mark.parametrize("first", [HEAD + b"\r\n", HEAD + b"x-head: "])
def test_what_drips_is_no_page_and_no_answer(monkeypatch: pytest.MonkeyPatch, first: bytes) -> None:
    """One deadline for all of it: each of its bytes comes in time."""
    monkeypatch.setattr(http, "_PAGE_TIMEOUT_S", 0.2)
    with serving(drip(first)) as url:
        with pytest.raises(http.RequestFailed, match=r"no end after 0.2 s"):
            http.page(f"{url}/models", None)
        assert server_report(url, None) is None

        async def score() -> None:
            async with http.new_client(url, None, 0.2) as client:
                dialect = DIALECTS["vllm"]
                asked = AskedServer(ListedModel("m"), dialect, None)
                await TextScorer(client, asked, 1).score_all([([1], [2])], 1)

        with pytest.raises(
            RunError, match=r"log-probabilities of a text from .* no end after 0.2 s"
        ):
            asyncio.run(score())


def test_a_compressed_page_is_not_unpacked() -> None:
    """A few bytes may be gigabytes; nobody asked for compression."""
    packed = gzip.compress(b" " * 100_000_000)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"accept-encoding: identity" in head.lower()
        length = f"content-encoding: gzip\r\ncontent-length: {len(packed)}\r\n\r\n"
        writer.write(b"HTTP/1.1 200 OK\r\n" + length.encode() + packed)
        await writer.drain()
        writer.close()

    with serving(SimpleNamespace(serve=serve)) as url:
        assert len(http.page(f"{url}/models", None)) < 200_000


@pytest.mark.parametrize("name", ["http_proxy", "ALL_PROXY"])
def test_no_proxy_of_the_environment_is_asked(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Its time would be the server's."""
    proxy = EchoServer()
    with serving(proxy) as address:
        monkeypatch.setenv(name, address)
        with pytest.raises(RunError) as error:
            engine_of(url="http://server.example/v1", chat=False)
    assert mentions(str(error.value), "server running?", f"({name})", "not used", "tunnel")
    assert not proxy.bodies


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SSL_CERT_FILE", "gone.pem"),
        ("SSL_CERT_FILE", os.devnull),
        ("SSLKEYLOGFILE", "gone/keys"),
        ("ALL_PROXY", "socks5://127.0.0.1:1080"),
        ("HTTP_PROXY", "htp://user:secret@proxy"),
    ],
)
def test_variables_of_a_shell_stop_no_run(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    http._certificates.cache_clear()
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    monkeypatch.setenv("SSL_CERT_DIR", ".")
    monkeypatch.setenv(name, value)
    assert answered(open_engine(EchoServer())).tokens
    if name.startswith("SSL"):
        with pytest.raises(SettingError, match=f"^{name}={value}: cannot be used: "):
            http.new_client("https://server.example/v1", None, 1.0)


def test_a_certificate_that_is_not_trusted_is_named() -> None:
    def refuse(request: httpx2.Request) -> httpx2.Response:
        raise httpx2.ConnectError("CERTIFICATE_VERIFY_FAILED: self-signed")

    transport = httpx2.MockTransport(refuse)
    client = httpx2.AsyncClient(transport=transport, base_url="https://localhost")
    assert mentions(error_of(client), "SSL_CERT_FILE=FILE names a certificate to trust")
