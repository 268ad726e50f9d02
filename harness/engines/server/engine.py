"""Any server that speaks the OpenAI API as an engine: one that speculates, and one that does not.

An arm turns a question into one request per prompt (`request_form`), keeps as many in flight as the
run asks for, and yields the tokens as they arrive. `sending` sends each request and judges its
answer. Requests are sent by asyncio in a thread of the engine; the caller reads from queues.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
import math
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from harness.config.errors import RunError, SettingError
from harness.config.settings import DecodingSettings, ModelSettings
from harness.decoding.protocols import Iteration
from harness.engines.protocol import Arm, Engine, LoadRequest, Question
from harness.engines.requests import RequestError, RequestRecord, as_records
from harness.engines.server.connection import api_key, client_library, new_client
from harness.engines.server.counters import Counted, CounterPage
from harness.engines.server.dialects import penalises_prompts
from harness.engines.server.identity import check_same_weights, choose_model
from harness.engines.server.request_form import RequestForm
from harness.engines.server.sending import Outgoing, Sender, arrival_times, send_all
from harness.results.servers import ServedModel, ServerReport, server_report

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# (takes_ids, takes_extensions) of `RequestForm`: the first pair that a server understands is taken.
_FORMS = ((True, True), (False, True), (False, False))
Message = TypeVar("Message")

# New tokens of the request that finds out how a server is asked.
_PROBE_TOKENS = 8

# Seconds without a token from any request after which a line says so.
QUIET_S = 20.0


class ServerEngine(Engine):
    """An `Engine` whose arms are two servers, or one.

    Args:
        settings: of `engine=server`. `url` is the speculative arm if there is a `regular_url`, else
            the regular arm.
        tokenizer: of the model that is served.
        model: that is served, under `settings.model` or a name by which it can be found.
        batch_size: requests in flight; a question may have more prompts. Without effect at a set
            `rate`.
        say: called with a line when nothing arrives for long.
        longest_prompt, max_new_tokens: for which the servers must have room, in tokens.

    Raises:
        SettingError: the API key is not in the environment, the client is not installed, or a
            server does not serve the model or has too short a context.
        RunError: a server does not answer.
    """

    queues = True

    def __init__(
        self,
        settings: Any,
        tokenizer: PreTrainedTokenizerBase,
        model: ModelSettings,
        batch_size: int = 1,
        say: Callable[[str], None] = lambda message: None,
        longest_prompt: int = 0,
        max_new_tokens: int = 0,
    ) -> None:
        openai = client_library()
        key = api_key("engine.api_key_variable", settings.api_key_variable)
        # By the setting of its address, each server with the name of its model there.
        servers = {"engine.url": (settings.url, settings.model)}
        if settings.regular_url is not None:
            name = settings.regular_model or settings.model
            servers = {"engine.regular_url": (settings.regular_url, name), **servers}
        reports = {setting: server_report(url, key) for setting, (url, _) in servers.items()}
        models = {
            setting: choose_model(reports[setting], model, name, setting, url)
            for setting, (url, name) in servers.items()
        }
        if settings.model is None and settings.regular_model is None:
            check_same_weights(list(models.values()))
        for setting, served in models.items():
            if longest_prompt + max_new_tokens > (served.context or math.inf):
                url, _ = servers[setting]
                context = f"{setting}={url} has a context of {served.context} tokens"
                rule = f"leaves too little room: {context}, and a prompt has {longest_prompt}"
                raise SettingError("decoding.max_new_tokens", rule, max_new_tokens)
        # A loop in a thread, because a notebook runs one in the caller's.
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="requests", daemon=True)
        self._thread.start()
        self.arms: list[ServerArm] = []
        for name, setting in zip(("regular", "speculative"), servers, strict=False):
            url, _ = servers[setting]
            self.arms.append(
                ServerArm(
                    name,
                    setting,
                    new_client(openai, url, key, settings.timeout_s),
                    reports[setting],
                    models[setting],
                    tokenizer,
                    settings,
                    batch_size,
                    self._loop,
                    say,
                )
            )
        try:
            for arm in self.arms:
                arm.wait_for(asyncio.run_coroutine_threadsafe(arm.connect(), self._loop))
        except BaseException:
            self.close()
            raise
        if len(self.arms) == 1 and self.arms[0].drafts:
            # A server alone is measured as it is.
            self.arms[0].name = "speculative"
        self.has_rate = settings.rate is not None
        self.reports_token_ids = all(arm.reports_token_ids for arm in self.arms)
        self.salts = all(arm.salts for arm in self.arms)
        names = dict.fromkeys(arm.server for arm in self.arms if arm.server)
        self.server = "; ".join(names) or None
        self.served_model = "; ".join(dict.fromkeys(map(str, models.values())))

    def close(self) -> None:
        for arm in self.arms:
            asyncio.run_coroutine_threadsafe(arm.client.close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class ServerArm(Arm):
    """One server.

    Args:
        address_setting: the setting of its address.
        client: OpenAI's, for the server's API.
        report: as it describes itself; None where it does not.
        model: that is asked for.
        loop: runs the requests, in another thread.

    The other arguments are those of `ServerEngine`.

    Attributes:
        reports_token_ids: whether answers come with the ids of their tokens, after a prompt that
            the server read as the ids that are known here, or as a chat.
        server: its name and version, as it says; None where it does not.

    `connect` sets `reports_token_ids` and `never_drawn`.
    """

    def __init__(
        self,
        name: str,
        address_setting: str,
        client: Any,
        report: ServerReport | None,
        model: ServedModel,
        tokenizer: PreTrainedTokenizerBase,
        settings: Any,
        batch_size: int,
        loop: asyncio.AbstractEventLoop,
        say: Callable[[str], None],
    ) -> None:
        self.name = name
        self.client = client
        self.say = say
        self.reports_token_ids = False
        self.server = report.name if report else None
        self.penalises_prompts = penalises_prompts(model.owner)
        self._model = model
        self._tokenizer = tokenizer
        self._settings = settings
        self._batch_size = batch_size
        self._loop = loop
        self._sender = Sender(client, tokenizer, settings)
        key = client.api_key if settings.api_key_variable else None
        # The setting is about `engine.url`; the regular server's page is below its own address.
        page = settings.metrics_url if address_setting == "engine.url" else None
        self._page = CounterPage(str(client.base_url), key, page)
        self._counted_before: Counted | None = None
        self._num_restarts = 0
        self._num_extra = itertools.count()
        self._address_setting = address_setting

    @property
    def given_up(self) -> str | None:
        return self._sender.given_up

    @property
    def salts(self) -> bool:
        """Whether the server's prefix cache heeds salts."""
        return self._form.salts

    def as_read(self, prompt: Sequence[int]) -> Sequence[int]:
        return self._form.as_read(prompt)

    def counted(self) -> Counted | None:
        now = self._page.read()
        before = self._counted_before
        if now is None or before is None:
            return None
        # The server may also have been restarted between this question and the one before it.
        growth = now.since(replace(before, restarts=self._num_restarts))
        self._num_restarts = now.restarts
        return growth

    def stream(self, question: Question) -> Iterator[Iteration]:
        """A record for the chunks that arrive together; the first has every row's first token.

        A request that fails keeps the tokens it has, and its error. If the server sends text alone,
        the tokens of a row come at its end: the tokens of a piece of text depend on where it was
        cut.
        """
        num_rows = len(question.prompts)
        bodies = [self._form.body(question, row) for row in range(num_rows)]
        pairs = zip(question.indices, question.prompts, strict=True)
        self.last_requests = [RequestRecord(index, len(prompt)) for index, prompt in pairs]
        arrivals = _Arrivals(self._loop)
        requests = []
        for row, (body, request) in enumerate(zip(bodies, self.last_requests, strict=True)):
            requests.append((body, request, functools.partial(arrivals.add, row)))
        rate = self._settings.rate
        self._counted_before = self._page.read()

        async def ask() -> None:
            self.last_load = await send_all(
                self._sender,
                requests,
                _refuse_empty,
                self._batch_size,
                rate,
                times=arrival_times(question, rate) if rate else (),
                extra=self._extra(question.extra) if question.extra else None,
                begin=lambda: arrivals.queue.put({}),
            )

        received: Iterator[dict[int, list[int]]] = self._received(ask, arrivals.queue)
        if rate and question.extra:
            # No clock runs yet while the load builds up.
            next(received)
        return as_records(received, num_rows)

    def _extra(self, question: Question) -> Iterator[Outgoing]:
        """Requests for the prompts of a question, again and again, each with a salt of its own."""
        for row in itertools.cycle(range(len(question.prompts))):
            number = next(self._num_extra)
            salts = [f"{salt} {number}" for salt in question.salts]
            body = self._form.body(dataclasses.replace(question, salts=salts), row)
            request = RequestRecord(question.indices[row], len(question.prompts[row]))
            yield body, request, lambda tokens: None

    def under_load(
        self, requests: Sequence[LoadRequest], num_in_flight: int
    ) -> Iterator[RequestRecord]:
        bodies = [self._form.body(request.question, 0, request.parameters) for request in requests]
        self.last_requests = [
            RequestRecord(place, len(request.question.prompts[0]), leave_after=request.leave_after)
            for place, request in enumerate(requests)
        ]
        ended: SimpleQueue[RequestRecord | None] = SimpleQueue()
        outgoing = [
            (body, request, lambda tokens: None)
            for body, request in zip(bodies, self.last_requests, strict=True)
        ]

        async def ask() -> None:
            # An answer without a token is no failure here: it is judged like any other text.
            await send_all(
                self._sender, outgoing, lambda body, request: ended.put(request), num_in_flight
            )

        yield from self._received(ask, ended)

    def _received(
        self, ask: Callable[[], Coroutine[Any, Any, None]], queue: SimpleQueue[Message | None]
    ) -> Iterator[Message]:
        """Run `ask` and yield what it puts into the queue; it is cancelled if nobody reads on.

        A line says when nothing arrives for long.
        """
        running = asyncio.run_coroutine_threadsafe(ask(), self._loop)
        running.add_done_callback(lambda _: queue.put(None))
        self._sender.last_event = time.perf_counter()
        try:
            while True:
                try:
                    message = queue.get(timeout=QUIET_S)
                except Empty:
                    self._say_if_silent()
                    continue
                if message is None:
                    break
                yield message
        finally:
            running.cancel()
        running.result()

    def _say_if_silent(self) -> None:
        """Say so where requests are in flight and none of them has got anything for long."""
        silent_s = time.perf_counter() - self._sender.last_event
        if silent_s < QUIET_S or not self._sender.num_in_flight:
            return
        num_ended = sum(request.seconds > 0 for request in self.last_requests)
        self.say(
            f"{self.name}: nothing from {self.client.base_url} for {silent_s:.0f} s;"
            f" {num_ended} of {len(self.last_requests)} requests have ended, and"
            f" engine.timeout_s={self._settings.timeout_s:g} ends those that have not"
        )

    def wait_for(self, connecting: Future[None]) -> None:
        """Wait until `connect` has ended, or raise its error. A line says when that takes long."""
        while not wait([connecting], timeout=QUIET_S).done:
            self.say(f"{self.name}: waiting for an answer from {self.client.base_url}")
        connecting.result()

    async def connect(self) -> None:
        """Find the form in which the server takes requests.

        Raises:
            RunError: it answers no request in any form.
        """
        chat = self._settings.chat
        ids = self._tokenizer("a")["input_ids"]
        # Enough that a server that speculates drafts something.
        decoding = DecodingSettings(max_new_tokens=_PROBE_TOKENS, temperature=0)
        question = Question(prompts=[ids], decoding=decoding, seed=0, indices=[0])
        for takes_ids, takes_extensions in _FORMS:
            self._form = RequestForm(
                self._tokenizer,
                self._model.name,
                self._model.owner,
                chat,
                takes_ids,
                takes_extensions,
            )
            request = RequestRecord(0, len(ids))
            await self._sender.send(self._form.body(question, 0), request, lambda tokens: None)
            error = request.error
            if error is None:
                # A reference reads the prompt's ids, and a server may read other ids in its text.
                # Answers in a chat are compared with each other alone.
                reads_as_known = takes_ids or chat
                self.reports_token_ids = reads_as_known and not request.from_text
                self.never_drawn = request.never_drawn
                counted = self._page.read()
                sums = request.sums
                self.drafts = bool(
                    (sums and sums.num_drafted)
                    or (counted and (counted.drafts or counted.proposed))
                )
                return
            # Of another status the form is not the reason.
            if error.code not in (400, 404, 422):
                break
        assert error is not None
        place = self._address_setting
        if str(self.client.base_url) not in error.message:
            place += f"={self.client.base_url}"
        advice = ""
        if chat and self._tokenizer.chat_template is None and error.code in (400, 500):
            advice = (
                "\nthe server may have no chat template, which engine.chat=true needs there;"
                " the model's tokenizer has none"
            )
        raise RunError(f"{place}: {error}{advice}")


def _refuse_empty(body: dict[str, Any], request: RequestRecord) -> None:
    """Make an answer without a token a failure, unless a text may have ended it at once."""
    if request.error is None and request.num_tokens == 0 and "stop" not in body:
        request.error = RequestError(0, "AnswerError", "the answer has no token")


class _Arrivals:
    """Tokens by row, from the asyncio thread to the reader.

    Those of one turn of the asyncio loop are one message, because each message wakes the reader.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.queue: SimpleQueue[dict[int, list[int]] | None] = SimpleQueue()
        self._loop = loop
        self._new: dict[int, list[int]] = {}

    def add(self, row: int, tokens: list[int]) -> None:
        """Note new tokens of one row; none if it has ended without any."""
        if not self._new:
            self._loop.call_soon(self._flush)
        self._new[row] = self._new.get(row, []) + tokens

    def _flush(self) -> None:
        self.queue.put(self._new)
        self._new = {}
