"""Any server that speaks the OpenAI API as an engine: one that speculates, and one that does not."""

from __future__ import annotations

import asyncio
import functools
import itertools
import random
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from harness.config.errors import HarnessError, RunError, from_outside
from harness.config.settings import DecodingSettings
from harness.decoding.protocols import Iteration
from harness.engines.chunks import check_length, check_usage, joined_surrogates, read_chunk
from harness.engines.connection import (
    api_key,
    client_library,
    closed_by_server,
    events,
    is_about_connections,
    new_client,
    sent,
)
from harness.engines.counters import Counted, CounterPage
from harness.engines.dialects import penalises_prompts
from harness.engines.identity import reported_name
from harness.engines.protocol import Arm, Engine, LoadRequest, Question
from harness.engines.request_form import RequestForm
from harness.engines.requests import RequestError, RequestRecord, as_records

# Ways to send a prompt, the first that a server understands is taken: as token ids or as text, with or without the
# parameters that OpenAI does not have.
_WAYS = ((True, True), (False, True), (False, False))
Message = TypeVar("Message")

# Requests without an answer in a row, beyond those that are in flight together, after which no more are sent: each may
# take `engine.timeout_s`.
_MOST_UNANSWERED = 4

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
        openai = client_library()
        key = api_key(settings)
        # A loop in a thread, because a notebook runs one in the caller's.
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="requests", daemon=True)
        self._thread.start()
        urls = [url for url in (settings.regular_url, settings.url) if url]
        clients = [new_client(openai, url, key, settings.timeout_s) for url in urls]
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
        self.reports_token_ids = all(arm.reports_token_ids for arm in self.arms)
        self.salts = all(arm.salts for arm in self.arms)
        names = dict.fromkeys(arm.server for arm in self.arms if arm.server)
        self.server = "; ".join(names) or None

    def close(self) -> None:
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
    reports_token_ids: bool = False
    server: str | None = None
    never_drawn: frozenset[int] = frozenset()
    penalises_prompts: bool = False
    given_up: str | None = None
    _num_unanswered: int = 0
    _last_event: float = 0.0
    _before: Counted | None = None

    def __post_init__(self) -> None:
        key = self.client.api_key if self.settings.api_key_variable else None
        # The page of the regular server is below its own address.
        page = self.settings.metrics_url
        other = self.name == "regular" and self.settings.regular_url
        self._page = CounterPage(str(self.client.base_url), key, None if other else page)

    def counted(self) -> Counted | None:
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
        bodies = [self._form.body(question, row) for row in range(len(pairs))]
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
        bodies = [self._form.body(request.question, 0, request.parameters) for request in requests]
        self.last_requests = [
            RequestRecord(place, len(request.question.prompts[0]), leave_after=request.leave_after)
            for place, request in enumerate(requests)
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
        owner = None
        try:
            models = [listed async for listed in self.client.models.list()]
            if model not in [listed.id for listed in models]:
                model = models[0].id
            owner = models[0].owned_by
            self.penalises_prompts = penalises_prompts(owner)
            self.server = await reported_name(self.client, owner)
        except Exception:
            pass  # some servers have no such list; the request below shows whether this one works
        chat = self.settings.chat
        ids = self.tokenizer("a")["input_ids"]
        question = Question(
            prompts=[ids],
            decoding=DecodingSettings(max_new_tokens=1, temperature=0),
            seed=0,
            indices=[0],
        )
        for takes_ids, takes_extensions in _WAYS:
            self._form = RequestForm(
                self.tokenizer, model, owner, chat, takes_ids, takes_extensions
            )
            request = RequestRecord(0, len(ids))
            await self._ask(self._form.body(question, 0), request, lambda tokens: None)
            if request.error is None:
                self.reports_token_ids = (takes_ids or chat) and not request.from_text
                self.never_drawn = request.never_drawn
                return
            if request.error.code not in (400, 404, 422):
                break
        is_regular = self.name == "regular" and self.settings.regular_url
        setting = "engine.regular_url" if is_regular else "engine.url"
        advice = ""
        if chat and self.tokenizer.chat_template is None:
            advice = (
                "\nthe model's tokenizer has no chat template, which engine.chat=true needs there"
            )
        raise RunError(f"{setting}={self.client.base_url}: {request.error}{advice}")

    @property
    def salts(self) -> bool:
        """Whether a prompt that is asked again is none that a prefix cache knows."""
        return self._form.salts

    def as_read(self, prompt: Sequence[int]) -> Sequence[int]:
        return self._form.as_read(prompt)

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
                may_be_empty = "stop" in bodies[row]
                if request.error is None and request.num_tokens == 0 and not may_be_empty:
                    request.error = RequestError(0, "AnswerError", "the answer has no token")

        await asyncio.gather(*(ask(row, due) for row, due in enumerate(itertools.accumulate(gaps))))

    async def _ask(
        self, body: dict[str, Any], request: RequestRecord, add: Callable[[list[int]], None]
    ) -> None:
        """Send one request, and note in it how that went; `add` gets its tokens, or none."""
        if self.given_up is not None:
            request.error = RequestError(0, "NotSent", self.given_up)
            add([])
            return
        timeout_s = self.settings.timeout_s
        failure: Exception | None = None
        try:
            async with asyncio.timeout(timeout_s):
                try:
                    await self._read(body, request, add)
                except Exception as error:
                    # A server that died of a request does not get it twice.
                    if request.on_new_connection or not closed_by_server(error):
                        raise
                    request.sent_again = True
                    await self._read(body, request, add)
        except TimeoutError as error:
            failure = error
            request.error = RequestError(408, "Timeout", f"no end after {timeout_s:g} s")
        except asyncio.CancelledError:
            request.error = RequestError(499, "Cancelled", "not read to its end")
            raise
        except Exception as error:
            failure = error
            request.error = self._explained(error)
        self._count_unanswered(request, failure)
        request.text = joined_surrogates(request.text)
        if not request.token_ids:
            self._read_tokens(request)
            add(request.token_ids)
        request.num_tokens = request.num_tokens or len(request.token_ids)

    def _count_unanswered(self, request: RequestRecord, failure: Exception | None) -> None:
        """Give the server up after many requests in a row to which nothing came, no refusal either."""
        is_refused = hasattr(failure, "status_code") or isinstance(failure, HarnessError)
        if failure is None or request.arrivals or is_refused:
            self._num_unanswered = 0
            return
        self._num_unanswered += 1
        in_flight = sum(one.started_ns > 0 and not one.seconds for one in self.last_requests)
        if self._num_unanswered > _MOST_UNANSWERED + in_flight:
            number = f"{self._num_unanswered} requests in a row had no answer"
            self.given_up = f"{number}, the last with {request.error}; no more are sent"

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
        sent.set(request)
        request.started_ns, started = time.time_ns(), time.perf_counter()
        try:
            completions = (
                self.client.chat.completions if self.settings.chat else self.client.completions
            )
            async with completions.with_streaming_response.create(**body) as response:
                async for event in events(response):
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
            request.count_undrafted()

    def _explained(self, error: Exception) -> RequestError:
        """A failure without the API key, in one short line."""
        message = str(error)
        if is_about_connections(error) and error.__cause__ is not None:
            # The client says "Connection error." of all of them.
            message = str(error.__cause__) or message
        if self.settings.api_key_variable:
            message = message.replace(self.client.api_key, "***")
        code = getattr(error, "status_code", 0)
        return RequestError(code, type(error).__name__, from_outside(message))


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
