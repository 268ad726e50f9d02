"""Any server that speaks the OpenAI API as an engine: one that speculates, and one that does not."""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import os
import random
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextvars import ContextVar
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from harness.config.errors import RunError, SettingError, from_outside
from harness.config.settings import DecodingSettings
from harness.decoding.protocols import Iteration
from harness.engines.chunks import check_length, check_usage, joined_surrogates, read_chunk
from harness.engines.counters import Counted, CounterPage
from harness.engines.dialects import in_words_of, past_the_cache, penalises_prompts
from harness.engines.identity import told_name
from harness.engines.protocol import Arm, Engine, LoadRequest, Question
from harness.engines.requests import RequestError, RequestRecord, as_records

# Ways to send a prompt, the first that a server understands is taken: as token ids or as text, with or without the
# parameters that OpenAI does not have.
_WAYS = ((True, True), (False, True), (False, False))
Message = TypeVar("Message")

# The request that the current task sends.
_sent: ContextVar[RequestRecord] = ContextVar("_sent")
# Seconds without a token from any request after which a line says so.
QUIET_S = 20.0


class ServerEngine(Engine):
    """An `Engine` whose arms are two servers, or one.

    Args:
        settings: of `engine=server`. `url` is the speculative arm if there is a `regular_url`, else the
            regular arm.
        tokenizer: of the model that is served.
        model: its repository. Where a server has no model of that name, its first one is taken.
        batch_size: requests in flight; a question may have more prompts. Without effect at a set `rate`.
        say: called with a line when nothing arrives for long.

    Raises:
        SettingError: the API key is not in the environment, or the client is not installed.
        RunError: a server does not answer.
    """

    queues = True

    def __init__(
        self,
        settings: Any,
        tokenizer: PreTrainedTokenizerBase,
        model: str,
        batch_size: int = 1,
        say: Callable[[str], None] = lambda message: None,
    ) -> None:
        openai = _client_library()
        key = _api_key(settings)
        # A loop in a thread, because a notebook runs one in the caller's.
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="requests", daemon=True)
        self._thread.start()
        urls = [url for url in (settings.regular_url, settings.url) if url]
        clients = [_client(openai, url, key, settings.timeout_s) for url in urls]
        self.arms: list[ServerArm] = [
            ServerArm(name, client, tokenizer, settings, batch_size, self._loop, say)
            for name, client in zip(("regular", "speculative"), clients, strict=False)
        ]
        try:
            for arm in self.arms:
                arm.wait_for(asyncio.run_coroutine_threadsafe(arm.connect(model), self._loop))
        except BaseException:
            self.close()
            raise
        self.has_rate = settings.rate is not None
        self.tells_tokens = all(arm.tells_tokens for arm in self.arms)
        self.salts = all(arm.salts for arm in self.arms)
        names = dict.fromkeys(arm.server for arm in self.arms if arm.server)
        self.server = "; ".join(names) or None

    def close(self) -> None:
        """See `Engine.close`."""
        for arm in self.arms:
            asyncio.run_coroutine_threadsafe(arm.client.close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@dataclass
class ServerArm(Arm):
    """One server."""

    name: str
    client: Any
    tokenizer: PreTrainedTokenizerBase
    settings: Any
    batch_size: int
    loop: asyncio.AbstractEventLoop
    say: Callable[[str], None]
    tells_tokens: bool = False
    server: str | None = None
    never_drawn: frozenset[int] = frozenset()
    penalises_prompts: bool = False
    _last_event: float = 0.0
    _before: Counted | None = None
    # The owner in the server's list of models.
    _owner: str | None = None
    # No earlier run had the same.
    _salt: str = field(default_factory=lambda: secrets.token_hex(16))

    def __post_init__(self) -> None:
        key = self.client.api_key if self.settings.api_key_variable else None
        # The page of the regular server is below its own address.
        page = self.settings.metrics_url
        other = self.name == "regular" and self.settings.regular_url
        self._page = CounterPage(str(self.client.base_url), key, None if other else page)

    def counted(self) -> Counted | None:
        """See `Arm.counted`."""
        if self._before is None:
            return None
        now = self._page.read()
        return None if now is None else now.since(self._before)

    def stream(self, question: Question) -> Iterator[Iteration]:
        """See `Arm.stream`. After the first record there is one for the chunks that arrive together.

        A request that fails keeps the tokens it has, and its error. If the server sends text alone, the tokens of a
        row come at its end: the tokens of a piece of text depend on where it was cut.
        """
        pairs = list(zip(question.indices, question.prompts, strict=True))
        bodies = [self._body(question, row) for row in range(len(pairs))]
        self.last_requests = [RequestRecord(index, len(prompt)) for index, prompt in pairs]
        arrivals = _Arrivals(self.loop)
        self._before = self._page.read()

        def records() -> Iterator[Iteration]:
            asking = self._ask_all(question.seed, bodies, arrivals)
            received: Iterator[dict[int, list[int]]] = self._received_from(asking, arrivals.queue)
            yield from as_records(received, len(bodies))

        return records()

    def under_load(
        self, requests: Sequence[LoadRequest], num_in_flight: int
    ) -> Iterator[RequestRecord]:
        """See `Arm.under_load`."""
        bodies = [self._body(one.question, 0, one.parameters) for one in requests]
        self.last_requests = [
            RequestRecord(place, len(one.question.prompts[0]), leave_after=one.leave_after)
            for place, one in enumerate(requests)
        ]
        ended: SimpleQueue[RequestRecord | None] = SimpleQueue()
        asking = self._ask_in_flight(bodies, num_in_flight, ended.put)
        yield from self._received_from(asking, ended)

    def _received_from(
        self, asking: Coroutine[Any, Any, None], queue: SimpleQueue[Message | None]
    ) -> Iterator[Message]:
        """Yield what `asking` puts into the queue, until it ends; it is cancelled where nobody reads on."""
        running = asyncio.run_coroutine_threadsafe(asking, self.loop)
        running.add_done_callback(lambda _: queue.put(None))
        try:
            yield from self._received(queue)
        finally:
            running.cancel()
        running.result()

    async def _ask_in_flight(
        self,
        bodies: Sequence[dict[str, Any]],
        num_in_flight: int,
        note: Callable[[RequestRecord], None],
    ) -> None:
        in_flight = asyncio.Semaphore(num_in_flight)

        async def ask(body: dict[str, Any], request: RequestRecord) -> None:
            async with in_flight:
                await self._ask(body, request, lambda tokens: None)
            note(request)

        pairs = zip(bodies, self.last_requests, strict=True)
        await asyncio.gather(*(ask(*pair) for pair in pairs))

    def _received(self, queue: SimpleQueue[Message | None]) -> Iterator[Message]:
        """Yield arrivals until None comes; a line says when nothing arrives for long."""
        self._last_event = time.perf_counter()
        while True:
            try:
                message = queue.get(timeout=QUIET_S)
            except Empty:
                self._say_if_silent()
                continue
            if message is None:
                return
            yield message

    def _say_if_silent(self) -> None:
        """Say so where requests are under way and none of them has got anything for long."""
        silent_s = time.perf_counter() - self._last_event
        num_ended = sum(request.seconds > 0 for request in self.last_requests)
        num_begun = sum(request.started_ns > 0 for request in self.last_requests)
        if silent_s >= QUIET_S and num_begun > num_ended:
            self.say(
                f"{self.name}: nothing from {self.client.base_url} for {silent_s:.0f} s;"
                f" {num_ended} of {len(self.last_requests)} requests have ended, and"
                f" engine.timeout_s={self.settings.timeout_s:g} ends those that have not"
            )

    def wait_for(self, connecting: Future[None]) -> None:
        """Wait until the server is known, or has failed. A line says when that takes long."""
        while not wait([connecting], timeout=QUIET_S).done:
            self.say(f"{self.name}: waiting for an answer from {self.client.base_url}")
        connecting.result()

    async def connect(self, model: str) -> None:
        """Find the model's name, and how the server takes a prompt. Raises RunError if it completes none."""
        self._model = model
        try:
            models = [found async for found in self.client.models.list()]
            self._model = model if model in [found.id for found in models] else models[0].id
            self._owner = models[0].owned_by
            self.penalises_prompts = penalises_prompts(self._owner)
            self.server = await told_name(self.client, self._owner)
        except (
            Exception
        ):  # some servers have no such list; the request below shows whether this one works
            pass
        ids = self.tokenizer("a")["input_ids"]
        question = Question([ids], DecodingSettings(max_new_tokens=1, temperature=0), 0, [0])
        for self._takes_ids, self._takes_extensions in _WAYS:
            request = RequestRecord(0, len(ids))
            await self._ask(self._body(question, 0), request, lambda tokens: None)
            if request.error is None:
                takes_ids = self._takes_ids or self.settings.chat
                self.tells_tokens = takes_ids and not request.from_text
                self.never_drawn = request.never_drawn
                return
            if request.error.code not in (400, 404, 422):
                break
        setting = (
            "engine.regular_url"
            if self.name == "regular" and self.settings.regular_url
            else "engine.url"
        )
        raise RunError(f"{setting}={self.client.base_url}: {request.error}")

    def _body(
        self, question: Question, row: int, parameters: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """The client's arguments. Every parameter is set that a server may have a default for.

        Args:
            parameters: further ones, which take the place of those that are set.
        """
        decoding = question.decoding
        body: dict[str, Any] = {
            "model": self._model,
            **self._prompt(question, row),
            "max_tokens": decoding.max_new_tokens,
            "temperature": decoding.temperature,
            "top_p": decoding.top_p,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        extra = dict(parameters or {})
        if self._takes_extensions:
            extra = self._extensions(question, row) | extra
            longest = len(question.prompts[row]) + decoding.max_new_tokens
            extra = in_words_of(self._owner, extra, longest)
        elif decoding.top_k:
            raise SettingError(
                "decoding.top_k", "must be 0: the server has no such parameter", decoding.top_k
            )
        return body | {"extra_body": extra} if extra else body

    def _extensions(self, question: Question, row: int) -> dict[str, Any]:
        """Parameters that OpenAI does not have, by vLLM's names."""
        decoding = question.decoding
        extensions = {
            "top_k": decoding.top_k or -1,  # keeps all; not every server takes 0 for that
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "ignore_eos": not question.stop_tokens,
            "stop_token_ids": sorted(question.stop_tokens),
            "return_token_ids": True,
            "return_spec_tokens_details": True,
        }
        if self._owner == "harness":
            # The random numbers of `engine=local`.
            extensions |= {"seed": question.seed, "index": question.indices[row]}
        if question.repeats:
            extensions |= self._past_the_cache(question.repeats[row]) or {}
        return extensions

    @property
    def salts(self) -> bool:
        """Whether a prompt that is asked again is none that a prefix cache knows."""
        return self._takes_extensions and self._past_the_cache(0) is not None

    def _past_the_cache(self, repeat: int) -> dict[str, Any] | None:
        """Parameters that differ each time that all prompts are asked."""
        return past_the_cache(self._owner, f"{self._salt}-{repeat}")

    def _prompt(self, question: Question, row: int) -> dict[str, Any]:
        """A prompt as this server takes it: token ids, their text, or the messages of a chat."""
        ids = list(question.prompts[row])
        if not self.settings.chat and self._takes_ids:
            return {"prompt": ids}
        text = self._as_text(ids)
        if not self.settings.chat:
            return {"prompt": text}
        if question.chats:
            return {"messages": [dict(message) for message in question.chats[row]]}
        return {"messages": [{"role": "user", "content": text}]}

    def _as_text(self, prompt: Sequence[int]) -> str:
        # The server's own tokenizer adds the first token.
        ids = prompt[1:] if prompt[0] == self.tokenizer.bos_token_id else prompt
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=self.settings.chat))

    def as_read(self, prompt: Sequence[int]) -> Sequence[int]:
        """See `Arm.as_read`."""
        if self._takes_ids:
            return prompt
        return list(self.tokenizer(self._as_text(prompt))["input_ids"])

    async def _ask_all(
        self, seed: int, bodies: Sequence[dict[str, Any]], arrivals: _Arrivals
    ) -> None:
        """Send all requests: `batch_size` at a time, or at random times, the same ones for both arms."""
        rate = self.settings.rate
        drawn = random.Random(seed)
        requests = self.last_requests
        gaps = [0.0, *(drawn.expovariate(rate) if rate else 0.0 for _ in bodies[1:])]
        in_flight = asyncio.Semaphore(len(bodies) if rate else self.batch_size)

        async def ask(row: int, due: float) -> None:
            await asyncio.sleep(due)
            async with in_flight:
                request = requests[row]
                await self._ask(bodies[row], request, functools.partial(arrivals.add, row))
                if request.error is None and request.num_tokens == 0:
                    request.error = RequestError(0, "AnswerError", "the answer has no token")

        await asyncio.gather(*(ask(row, due) for row, due in enumerate(itertools.accumulate(gaps))))

    async def _ask(
        self, body: dict[str, Any], request: RequestRecord, add: Callable[[list[int]], None]
    ) -> None:
        """Send one request, and note in it how that went; `add` gets its tokens, or none."""
        timeout_s = self.settings.timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                try:
                    await self._read(body, request, add)
                except Exception as error:
                    # A server that died of a request does not get it twice.
                    if request.on_new_connection or not _closed_by_server(error):
                        raise
                    request.sent_again = True
                    await self._read(body, request, add)
        except TimeoutError:
            request.error = RequestError(408, "Timeout", f"no end after {timeout_s:g} s")
        except asyncio.CancelledError:
            request.error = RequestError(499, "Cancelled", "not read to its end")
            raise
        except Exception as error:
            request.error = self._explained(error)
        request.text = joined_surrogates(request.text)
        if not request.token_ids:
            self._read_tokens(request)
            add(request.token_ids)
        request.num_tokens = request.num_tokens or len(request.token_ids)

    def _read_tokens(self, request: RequestRecord) -> None:
        """Set the token ids of an ended answer: those of its events if none is missing, else those of its text."""
        # The parser of a chat holds some back.
        is_complete = request.num_tokens > 0 and len(request.shown_ids) == request.num_tokens
        if is_complete and not self.settings.chat:
            request.token_ids = request.shown_ids
            return
        request.from_text = True
        request.token_ids = self.tokenizer.encode(request.text, add_special_tokens=False)

    async def _read(
        self, body: dict[str, Any], request: RequestRecord, add: Callable[[list[int]], None]
    ) -> None:
        """Read an answer to its end. Raises AnswerError where it says what cannot be true."""
        finished = False
        usage = None
        max_tokens = body["max_tokens"]
        _sent.set(request)
        request.started_ns, started = time.time_ns(), time.perf_counter()
        try:
            completions = (
                self.client.chat.completions if self.settings.chat else self.client.completions
            )
            async with completions.with_streaming_response.create(**body) as response:
                async for event in _events(response):
                    self._last_event = time.perf_counter()
                    chunk = read_chunk(event)
                    request.note(chunk, time.perf_counter() - started)
                    check_length(max(len(request.token_ids), len(request.shown_ids)), max_tokens)
                    if chunk.token_ids:
                        add(chunk.token_ids)
                    if request.may_be_left:
                        return
                    finished = finished or chunk.finished
                    usage = usage if chunk.usage is None else chunk.usage
        finally:
            request.seconds = time.perf_counter() - started
        if not finished:
            raise RunError("the answer ended early")
        check_length(len(request.outcomes), max_tokens, "iterations")
        if usage is not None:
            check_usage(usage, len(request.token_ids), request.text, max_tokens)
            request.num_tokens = len(request.token_ids) or usage

    def _explained(self, error: Exception) -> RequestError:
        """A failure without the API key, in one short line."""
        message = str(error)
        if self.settings.api_key_variable:
            message = message.replace(self.client.api_key, "***")
        code = getattr(error, "status_code", 0)
        return RequestError(code, type(error).__name__, from_outside(message))


def _client_library() -> Any:
    try:
        import openai
    except ImportError as error:
        rule = "needs the openai package: pip install 'harness[server]'"
        raise SettingError("engine", rule, "server") from error
    return openai


def _client(openai: Any, url: str, key: str, timeout_s: float) -> Any:
    """A client of one server. A failed request is a result: it is counted, not repeated."""
    hooks = {"request": [_note_new_connection]}
    http_client = openai.DefaultAsyncHttpxClient(base_url=url, event_hooks=hooks)
    options = {"api_key": key, "timeout": timeout_s, "max_retries": 0}
    return openai.AsyncOpenAI(base_url=url, http_client=http_client, **options)


def _api_key(settings: Any) -> str:
    """The key from the environment; `none`, which the client sends, for servers without one."""
    variable = settings.api_key_variable
    key = os.environ.get(variable) if variable else "none"
    if not key:
        rule = "must name a variable of the environment"
        raise SettingError("engine.api_key_variable", rule, variable)
    return key


async def _note_new_connection(message: Any) -> None:
    """Have the HTTP library note in the request's record that it opens a connection."""
    request = _sent.get(None)
    if request is None:  # a question about the server itself
        return
    request.on_new_connection = False

    async def note(event: str, _: object) -> None:
        if event == "connection.connect_tcp.started":
            request.on_new_connection = True

    message.extensions = {**message.extensions, "trace": note}


def _closed_by_server(error: Exception) -> bool:
    """Whether a connection ended before any answer: a kept-alive one that the server had closed."""
    import openai

    # By name: which library has these depends on the version of the client.
    cause = type(error.__cause__).__name__
    closed = cause in ("RemoteProtocolError", "ReadError", "WriteError")
    return isinstance(error, openai.APIConnectionError) and closed


async def _events(response: Any) -> AsyncIterator[Any]:
    """The JSON of each server-sent event. The client's own reader takes ten times as long, and drops unknown fields."""
    rest = b""
    async for data in response.iter_bytes():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and b"[DONE]" not in line[:16]:
                yield json.loads(line[5:])


class _Arrivals:
    """Tokens by row. Those of one turn of the loop are one message, because each wakes the reader."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.queue: SimpleQueue[dict[int, list[int]] | None] = SimpleQueue()
        self._loop = loop
        self._new: dict[int, list[int]] = {}

    def add(self, row: int, tokens: list[int]) -> None:
        """Tokens of one row; none if it has ended without any."""
        if not self._new:
            self._loop.call_soon(self._flush)
        self._new[row] = self._new.get(row, []) + tokens

    def _flush(self) -> None:
        self.queue.put(self._new)
        self._new = {}
