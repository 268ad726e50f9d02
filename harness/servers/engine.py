"""Any server that speaks the OpenAI API as an engine: one that speculates, and one that does not.

An arm puts requests into the server's form (`request_form`), keeps as many in flight as the
run asks for, and notes when tokens arrive. `sending` sends each request and judges its
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
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import wait
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from harness.config.amounts import counted
from harness.config.errors import RunError, SettingError
from harness.config.model_names import SERVED
from harness.config.settings import DecodingSettings, api_key
from harness.engines.arrivals import FRAME_S, Arrival, Frames, Origin, Watch
from harness.engines.chat import Chat
from harness.engines.counts import Counts, growth
from harness.engines.protocol import (
    Answered,
    Arm,
    Blocks,
    Engine,
    Request,
    Servers,
    TextScores,
    Traits,
)
from harness.engines.rates import arrival_times
from harness.engines.record import Opening
from harness.engines.requests import Load, RequestError, RequestRecord
from harness.engines.text_tokenizer import TextTokenizer
from harness.engines.tokenizer import Tokenizer
from harness.servers.connection import new_client
from harness.servers.counters import CounterPage
from harness.servers.dialects import UNKNOWN, Dialect, dialect_of
from harness.servers.identity import (
    ServedModel,
    check_same_weights,
    choose_model,
    server_report,
)
from harness.servers.launch import Served, StartedServer
from harness.servers.logprobs import text_logprobs
from harness.servers.request_form import RequestForm, new_salt
from harness.servers.sending import Outgoing, Sender, send_at_times, send_in_turn
from harness.servers.settings import ServerSettings

if TYPE_CHECKING:
    import httpx2

# (takes_ids, takes_extensions, asks_for_details) of `RequestForm`: the first that a server understands is taken.
_FORMS = (
    (True, True, True),
    (True, True, False),
    (False, True, True),
    (False, True, False),
    (False, False, False),
)
# Statuses of a request in a form that a server does not take; of others the form is not the reason.
_FORM_ERRORS = (400, 404, 422, 500)

# New tokens of the request that finds out how a server is asked.
_PROBE_TOKENS = 8

# Seconds without a token from any request after which a line is printed about that.
QUIET_S = 20.0
# Seconds that starting servers again, side by side, may take in all, and the fewest starts that are worth it: Student's
# t of fewer is wide.
_MOST_RESTARTING_S = 20.0
_FEWEST_STARTS = 4
# Seconds to wait for a server that still answers others before it is measured, and between two looks.
_MOST_DRAINING_S = 10.0
_DRAIN_LOOK_S = 0.05
# Seconds before each lap. File writes between laps differ before the two arms, and slow the next requests: without a
# rest the first tokens of one of two identical arms came 0.25 ms later (`benchmarks/identical_arms.py`).
_REST_S = 0.02


class ServerEngine(Engine):
    """An `Engine` whose arms are two servers, or one: given by their addresses, or started here.

    Args:
        opening: the run, with its requests in flight (`batch_size`, without effect at a set `rate`).
        served: the server of each arm.
        num_blocks: how often each server is started; 0 starts all of them once. A block has one
            question for each arm, and one server at a time.
        blocks_if_needed: as `num_blocks`, where the servers do not start side by side.
        most_starts: how often both are started, side by side, where that takes little time: two processes of one
            program differ by some per cent, which an interval over the prompts of one start does not cover.

    Raises:
        SettingError: the API key is not in the environment, or a server does not serve the model or
            has too short a context.
        RunError: a server does not answer, or does not start.
    """

    def __init__(
        self,
        opening: Opening,
        served: Sequence[Served],
        num_blocks: int = 0,
        blocks_if_needed: int = 0,
        most_starts: int = 0,
    ) -> None:
        if opening.settings.JUDGES_DRAFT:
            served = [server for server in served if server.name == "speculative"] or served
        self.opening = opening
        settings = ServerSettings.of(opening.settings)
        self.settings = settings
        self.key = api_key("engine.api_key_variable", settings.api_key_variable)
        self.tokenizer: Tokenizer = opening.planned.tokenizer
        self.knows_tokens = not isinstance(self.tokenizer, TextTokenizer)
        self.say = opening.say
        self.servers: Servers = Servers(
            commands=[str(server.launch) for server in served if server.launch]
        )
        # A loop in a thread, because a notebook runs one in the caller's.
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="requests", daemon=True)
        self._thread.start()
        self.arms: list[ServerArm] = [ServerArm(self, server) for server in served]
        # Whether only one of them runs at a time.
        self._one_at_a_time = num_blocks > 0
        if num_blocks:
            self.blocks = Blocks(num_blocks, self._start_afresh)
        try:
            self._begin(blocks_if_needed, most_starts)
        except BaseException:
            self.close()
            raise
        if len(self.arms) == 1 and self.arms[0].drafts:
            # A server alone is measured as it is.
            self.arms[0].name = "speculative"

    def _begin(self, blocks_if_needed: int, most_starts: int) -> None:
        """Start all servers, or with blocks the first. If one of two ends for lack of memory, it is started alone, and
        blocks are taken. If starting takes little time, both are started several times.
        """
        started = time.perf_counter()
        try:
            self._start(self.arms[0])
        except RunError as error:
            failed = [arm for arm in self.arms if arm.ended is not None]
            is_one_of_two = len(self.arms) == 2 and len(failed) == 1
            if not (blocks_if_needed and is_one_of_two):
                raise
            self.say(f"{error}: it is started once more, alone")
            self._stop()
            for arm in self.arms:
                arm.model = None
            self._one_at_a_time = True
            self.blocks = Blocks(blocks_if_needed, self._start_afresh)
            started = time.perf_counter()
            self._start(failed[0])
        if not self.servers.commands:
            return
        self.setup_seconds = time.perf_counter() - started
        if self.blocks is None:
            num_starts = min(most_starts, 1 + int(_MOST_RESTARTING_S / self.setup_seconds))
            if num_starts >= _FEWEST_STARTS:
                self.blocks = Blocks(num_starts, self._start_afresh)
                self.say(
                    f"both servers are started {counted(num_starts, 'time')}, because two starts of one program differ:"
                    f" {(num_starts - 1) * self.setup_seconds:.0f} s more (engine.blocks=0 starts them once)"
                )
        else:
            number = self.blocks.number * len(self.arms)
            minutes = number * self.setup_seconds / 60
            duration = f"about {minutes:.0f} min" if minutes >= 1 else "less than a minute"
            # Such a run ends as soon as its interval is narrow enough.
            up_to = "up to " if self.opening.settings.is_until_precise else ""
            self.say(
                f"engine.blocks={self.blocks.number}: the servers take turns on the same devices, each started {up_to}"
                f"{counted(self.blocks.number, 'time')}; {number} starts take {duration}"
            )

    def make_ready(self, arm: ServerArm) -> None:
        """Start the server of an arm if it does not run; where only one may, the others end."""
        if arm.client is None:
            self._stop()
            self._start(arm)

    def _start(self, arm: ServerArm) -> None:
        """Start and connect the servers that run while this arm is asked, and describe all that are known by now."""
        together = [arm] if self._one_at_a_time else self.arms
        for server in together:
            server.launch()
        for server in together:
            server.identify()
        # With blocks, the server of one arm alone is known at first.
        models = [server.model for server in self.arms if server.model is not None]
        if all(server.served.model is None for server in self.arms):
            check_same_weights(models)
        for server in together:
            server.connect()
        self.servers = dataclasses.replace(
            self.servers,
            names=list(dict.fromkeys(server.server for server in self.arms if server.server)),
            models=list(dict.fromkeys(map(str, models))),
        )

    def _start_afresh(self, arm: Arm) -> None:
        """End every server if this arm's has answered; `make_ready` starts what the next question needs."""
        assert isinstance(arm, ServerArm)
        if arm.was_asked:
            self._stop()

    def _stop(self) -> None:
        for arm in self.arms:
            arm.stop()

    def goes_on(self, decoding: DecodingSettings, batch_size: int, longest_prompt: int) -> bool:
        """Servers start slowly: they stay for the same K, and no more or longer prompts than before."""
        opening = self.opening
        fits = decoding == opening.decoding and batch_size <= opening.batch_size
        fits = fits and longest_prompt <= opening.longest_prompt
        if fits:
            for arm in self.arms:
                arm.renew_salts()
        return fits

    def close(self) -> None:
        self._stop()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class ServerArm(Arm):
    """One server.

    Args:
        engine: has what all arms share, and makes this one ready where it may not run.
        served: where it is, or how it is started.

    Attributes:
        was_asked: whether it got a question since it was connected.
        client: of its API; None before `connect`, and after `stop`.
        requests: records of the last ones.
        drafts: whether it speculates, as far as it shows before it is measured.

    `identify` (model, dialect, server) and `connect` set the following, which stay when the server has ended:
        model: that it is asked for; None before the first time.
        dialect: how it is asked.
        form: of its requests.
        server: its name and version as it reports them; None where it does not.
    """

    dialect: Dialect = UNKNOWN
    form: RequestForm
    server: str | None = None

    def __init__(self, engine: ServerEngine, served: Served) -> None:
        self.name = served.name
        self.served = served
        self.model: ServedModel | None = None
        self.was_asked = False
        self.client: httpx2.AsyncClient | None = None
        self.requests: Sequence[RequestRecord] = ()
        self.drafts = False
        self._takes_tools = False
        self._engine = engine
        self._settings = engine.settings
        self._url = served.url or ""
        self._started: StartedServer | None = None
        # Of the requests that only keep up the load, in all questions.
        self._extra_numbers = itertools.count()

    def renew_salts(self) -> None:
        """Take no answer to an earlier question from the server's prefix cache."""
        if self.client is not None:
            self.form = dataclasses.replace(self.form, salt=new_salt())

    def launch(self) -> None:
        """Start the server, if it is one that is started here."""
        if self.served.launch is not None:
            self._started = StartedServer(self.served.launch)
            self._url = self._started.url

    @property
    def ended(self) -> str | None:
        """Why a server that was started here has ended; None while it runs."""
        return self._started.ended if self._started else None

    def identify(self) -> None:
        """Wait until the server is ready, and choose the model that it is asked for.

        Raises:
            SettingError: it does not serve the model, or has no room for the prompts.
            RunError: it has ended.
        """
        engine = self._engine
        opening = engine.opening
        url = self._url
        if self._started is not None:
            self._started.wait_until_ready(engine.say, engine.key)
        report = server_report(url, engine.key)
        served = self.served
        command = served.launch.command if served.launch else None
        place = served.setting if self._started else f"{served.setting}={url}"
        typed_model = None if command is None else command.model
        is_first = served.name == "regular" and self._settings.has_two
        model_setting = "engine.regular_model" if is_first else "engine.model"
        model = choose_model(
            report, opening.settings.model, served.model, typed_model, model_setting, place
        )
        max_new_tokens = opening.decoding.max_new_tokens
        num_tokens = opening.longest_prompt + max_new_tokens
        if engine.knows_tokens and num_tokens > (model.context or math.inf):
            context = f"{place} has a context of {model.context} tokens"
            rule = f"leaves too little room: {context}, and a prompt has {opening.longest_prompt}"
            raise SettingError("decoding.max_new_tokens", rule, max_new_tokens)
        typed_dialect = (command and command.dialect) or UNKNOWN
        self.dialect = dialect_of(model.owner or typed_dialect.name, self._settings.dialect)
        self.server = (report and self.dialect.named(report.about)) or None
        self.model = model

    def connect(self) -> None:
        """Find out how the server is asked. Raises RunError where it answers no request in any form."""
        engine = self._engine
        url = self._url
        self.client = new_client(url, engine.key, self._settings.timeout_s)
        self._sender = Sender(self.client, engine.tokenizer, self._settings)
        self._page = CounterPage(url, engine.key, self.served.pages)
        self._num_restarts = 0.0
        self._may_be_busy = False
        self._num_left = 0
        form_found = asyncio.run_coroutine_threadsafe(self._find_form(), engine.loop)
        while not wait([form_found], timeout=QUIET_S).done:
            engine.say(f"{self.name}: waiting for an answer from {url}")
        try:
            form_found.result()
        except RunError as error:
            ended = self._started.why_ended() if self._started else None
            raise RunError(ended or str(error)) from error

    def stop(self) -> None:
        """Close connections, and end the server if it was started here."""
        self.was_asked = False
        if self.client is not None:
            asyncio.run_coroutine_threadsafe(self.client.aclose(), self._engine.loop).result()
            self.client = None
        if self._started is not None:
            self._started.stop()
            self._started = None

    def _say(self, message: str) -> None:
        self._engine.say(f"{self.name}: {message}")

    def _idle_counters(self) -> Counts | None:
        """The counters once the server is idle, or has stayed busy with requests of others for `_MOST_DRAINING_S`.

        After such a wait in vain a server is not waited for again.
        """
        until = time.monotonic() + _MOST_DRAINING_S
        while (counts := self._page.read()) and counts.running and not self._may_be_busy:
            if time.monotonic() > until:
                self._may_be_busy = True
                number = round(counts.running)
                whose = "this run" if number <= self._num_left else "others"
                self._say(f"the server still answers {counted(number, 'request')} of {whose}")
            time.sleep(_DRAIN_LOOK_S)
        return counts

    @property
    def given_up(self) -> str | None:
        ended = self.ended
        if ended is None and self._sender.given_up and self._started:
            ended = self._started.why_ended()
        return ended or self._sender.given_up

    def as_read(self, prompt: Sequence[int]) -> Sequence[int]:
        return self.form.as_read(prompt)

    def answer(
        self,
        requests: Sequence[Request],
        in_flight: int,
        extra: Sequence[Request] = (),
        watch: Watch | None = None,
    ) -> Answered:
        """Answers by the server, at the run's rate where it has one, whatever `in_flight` is.

        A request that fails keeps the tokens it has, and its error. If the server sends text alone,
        the tokens of a request come at its end: the tokens of a piece of text depend on where it was
        cut.
        """
        self._engine.make_ready(self)
        self.was_asked = True
        self._require_tools(requests)
        time.sleep(_REST_S)
        before = self._idle_counters()
        if before is not None:
            # The server may also have been restarted since the last answer ended.
            before = dataclasses.replace(before, restarts=self._num_restarts)
        rate = self._settings.rate
        self.requests = [request.record() for request in requests]
        arrivals: SimpleQueue[Arrival | None] = SimpleQueue()

        def shown(row: int, tokens: list[int]) -> None:
            record = self.requests[row]
            if tokens and watch is not None:
                seconds = record.seconds if record.from_text else record.arrivals[-1]
                arrivals.put(Arrival(row, seconds, tokens, [Origin.TARGET] * len(tokens)))

        outgoing = []
        for row, (request, record) in enumerate(zip(requests, self.requests, strict=True)):
            add = functools.partial(shown, row)
            outgoing.append(Outgoing(self.form.body(request), record, add))
        further = self._extra(extra) if extra else None
        if rate is None:
            asking = send_in_turn(self._sender, outgoing, further, in_flight)
        else:
            times = arrival_times(requests, rate)
            asking = send_at_times(self._sender, outgoing, further, rate, times, self._say)
        load = self._wait_for(asking, arrivals, watch or _unseen)
        self._num_left = sum(request.was_left for request in [*self.requests, *load.extra])
        for request, sent in zip(requests, outgoing, strict=True):
            # A text may have ended it at once.
            may_be_empty = request.may_be_empty or "stop" in sent.body
            if sent.request.error is None and not sent.request.num_tokens and not may_be_empty:
                sent.request.error = RequestError(0, "the answer has no token")
        grown = None
        now = self._page.read()
        if now is not None and before is not None:
            self._num_restarts = now.restarts
            grown = growth(now, before)
        seconds = load.seconds * load.share
        return Answered(requests=self.requests, seconds=seconds, load=load, counted=grown)

    def _require_tools(self, requests: Sequence[Request]) -> None:
        """Raises SettingError for a server whose prompts are no longer with tools than without: it leaves them out."""
        chats = (request.chat for request in requests if request.chat and request.chat.tools)
        if self._takes_tools or not self.form.chat or (offered := next(chats, None)) is None:
            return
        decoding = DecodingSettings(max_new_tokens=1, temperature=0)
        hello = ({"role": "user", "content": "Hello"},)
        lengths = []
        for chat in (Chat(hello, offered.tools), Chat(hello)):
            probe = Request([0], decoding, seed=0, index=0, chat=chat)
            record = probe.record()
            sent = self._sender.send(Outgoing(self.form.body(probe), record))
            asyncio.run_coroutine_threadsafe(sent, self._engine.loop).result()
            if record.error is not None:
                rule = f"have tools, which the {self.name} server refuses: {record.error}"
                raise SettingError("prompts", rule)
            lengths.append(record.num_read)
        if lengths[0] is not None and lengths[0] == lengths[1]:
            rule = f"have tools, and the chat template of the {self.name} server shows none: {self._url}"
            raise SettingError("prompts", rule)
        self._takes_tools = True

    def _extra(self, requests: Sequence[Request]) -> Iterator[Outgoing]:
        """The same requests again and again, each with another salt."""
        for request in itertools.cycle(requests):
            salted = dataclasses.replace(
                request, salt=f"{request.salt} {next(self._extra_numbers)}"
            )
            yield Outgoing(self.form.body(salted), salted.record())

    @property
    def scores(self) -> TextScores | None:
        scoring = self.dialect.scoring
        if scoring is None:
            return None
        assert self.model is not None
        return functools.partial(
            text_logprobs, self._ready_client, self._engine.loop, self.model.name, scoring
        )

    def _ready_client(self) -> httpx2.AsyncClient:
        self._engine.make_ready(self)
        assert self.client is not None
        return self.client

    def _wait_for(
        self,
        asking: Coroutine[Any, Any, Load],
        arrivals: SimpleQueue[Arrival | None],
        watch: Watch,
    ) -> Load:
        """Run what asks the server, and show the watcher what arrives; it is cancelled if nobody waits any more.

        A line is printed when nothing arrives for long.

        Args:
            arrivals: that `asking` notes, for the watcher.
        """
        frames = Frames(watch)
        new: list[Arrival] = []
        running = asyncio.run_coroutine_threadsafe(asking, self._engine.loop)
        running.add_done_callback(lambda _: arrivals.put(None))
        self._sender.last_event = time.perf_counter()
        try:
            while True:
                try:
                    arrival = arrivals.get(timeout=FRAME_S if new else QUIET_S)
                except Empty:
                    if new:
                        frames.show(new)
                        new = []
                        continue
                    silent_s = time.perf_counter() - self._sender.last_event
                    if silent_s >= QUIET_S and self._sender.num_in_flight:
                        num_ended = sum(request.seconds > 0 for request in self.requests)
                        self._say(
                            f"nothing from {self._url} for {silent_s:.0f} s;"
                            f" {num_ended} of {len(self.requests)} requests have ended, and"
                            f" engine.timeout_s={self._settings.timeout_s:g} ends those that have not"
                        )
                    continue
                if arrival is None:
                    break
                new.append(arrival)
                if frames.is_due():
                    frames.show(new)
                    new = []
        finally:
            running.cancel()
        frames.show(new)
        return running.result()

    async def _find_form(self) -> None:
        """Find the form in which the server takes requests.

        Raises:
            RunError: it answers no request in any form.
        """
        assert self.model is not None
        chat = self._settings.chat is True
        ids = self._engine.tokenizer("a")["input_ids"]
        # Enough that a server that speculates drafts something.
        decoding = DecodingSettings(max_new_tokens=_PROBE_TOKENS, temperature=0)
        probe = Request(ids, decoding, seed=0, index=0, salt="form")
        extra = self._settings.extra or {}
        prompts = getattr(self._engine.opening.settings, "prompts", None)
        arguments = getattr(prompts, "template_arguments", None)
        if chat and arguments:
            extra = {"chat_template_kwargs": arguments, **extra}
        for takes_ids, takes_extensions, asks_for_details in _FORMS:
            if takes_ids and not self._engine.knows_tokens:
                continue
            self.form = RequestForm(
                self._engine.tokenizer,
                self.model.name,
                self.dialect,
                chat,
                takes_ids,
                takes_extensions,
                asks_for_details,
                extra,
                draws=self._engine.opening.decoding.temperature > 0,
            )
            request = probe.record()
            await self._sender.send(Outgoing(self.form.body(probe), request))
            error = request.error
            if error is None:
                # A reference reads the prompt's ids, and a server may read other ids in its text.
                # Answers in a chat are compared with each other alone.
                reads_as_known = takes_ids or chat
                self.traits = Traits(
                    reports_token_ids=reads_as_known and not request.from_text,
                    stops_at_tokens=self.form.stops_at_tokens,
                    never_drawn=request.never_drawn,
                    salts=self.form.salts,
                    penalises_prompts=self.dialect.penalised_tokens is not None,
                    logprobs=self.dialect.logprobs,
                    ended_by=self.dialect.ended_by,
                )
                counts = self._page.read() or Counts()
                numbers = (request.num_drafted, counts.drafts, counts.proposed)
                self.drafts = any(numbers)
                return
            if error.code not in _FORM_ERRORS:
                break
        assert error is not None
        place = self.served.setting
        if self._url not in error.message and self._started is None:
            place += f"={self._url}"
        advice = ""
        if error.code in (401, 403):
            advice = "; engine.api_key_variable names the variable with its key"
        elif error.code in _FORM_ERRORS and self.model.name == SERVED:
            advice = f"\n{SERVED} is a placeholder: engine.model= sets the name of the model there"
        elif error.code in _FORM_ERRORS and chat:
            advice = "\nif it has no chat template: engine.chat=false sends prompts as text"
        raise RunError(f"{place}: {error}{advice}")


def _unseen(arrivals: Sequence[Arrival]) -> None:
    """Nobody watches."""
