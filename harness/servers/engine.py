"""The engine `server`: its arms are two servers with an OpenAI API, one that speculates and one that does not, or a
single server.

The engine starts and ends the servers. Each arm sends its requests to one of them. An arm keeps as many requests in
flight as the settings say, and records when tokens arrive. Requests are sent by asyncio, in a thread of the engine
(`sending`).
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import math
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import wait
from typing import Any, TypeVar

from harness.config.amounts import counted
from harness.config.errors import RunError, SettingError
from harness.config.settings import DecodingSettings, api_key
from harness.engines.arrivals import Arrival
from harness.engines.counts import Counts
from harness.engines.protocol import (
    Answered,
    Arm,
    Blocks,
    Chat,
    Engine,
    Likeliest,
    NoteEnded,
    Request,
    Servers,
    Texts,
    TextScores,
)
from harness.engines.record import Opening
from harness.engines.requests import RequestRecord
from harness.engines.tokenizer import TextTokenizer
from harness.servers.connection import Connection, connect
from harness.servers.devices import devices_of
from harness.servers.dialects import UNKNOWN_DIALECT, dialect_of
from harness.servers.identity import AskedServer, check_same_weights, choose_model, server_report
from harness.servers.launch import Served, StartedServer
from harness.servers.logprobs import TextScorer
from harness.servers.sending import Outgoing, Sender, send_in_turn
from harness.servers.settings import ServerSettings

# A message is printed after this many seconds in which no token of any request has arrived.
QUIET_S = 20.0
# Servers that run side by side are started again only if all further starts together take at most this many seconds,
# and if there are at least this many starts: over fewer, a Student's t interval is wide.
_MOST_RESTARTING_S = 20.0
_FEWEST_STARTS = 4
# Seconds of rest before each lap. Between laps files are written, which slows the next requests, and the two arms do
# not follow the same files. Without a rest, the first tokens of one of two identical arms arrived 0.25 ms later than
# those of the other (`benchmarks/identical_arms.py`).
_REST_S = 0.02


Result = TypeVar("Result")


class ServerEngine(Engine):
    """An `Engine` whose arms are two servers or one. The servers are running already, or are started here.

    *Taking turns* means that only one of two servers runs at a time, so that each can use all devices. A block is then
    a start of each server, which answers the questions of one moment (`interleaving.ask_in_turns`).

    Args:
        opening: the run, with its number of requests in flight (`batch_size`).
        served: the server of each arm.
        num_blocks: how often each server is started if the two take turns; 0 if they must not take turns.
        takes_turns: whether they must take turns. Otherwise they take turns only if they cannot be started side by
            side, and `num_blocks` is not 0.
        most_starts: how often both are started side by side, if starting takes little time; 0 to start them once. Not
            used if they take turns. Two processes of the same program differ by a few per cent, which an interval over
            the prompts of one start does not cover.

    Raises:
        SettingError: if the API key is not in the environment, or is refused; if a server does not serve the model, or
            has too short a context; or if two servers serve different weights.
        RunError: if a server does not answer, or does not start.
    """

    def __init__(
        self,
        opening: Opening,
        served: Sequence[Served],
        num_blocks: int = 0,
        takes_turns: bool = False,
        most_starts: int = 0,
    ) -> None:
        self.opening = opening
        settings = ServerSettings.of(opening.settings)
        # Some commands, such as `acceptance`, ask only the arm that speculates. With two typed commands, both arms
        # stay, and so does a single server, whose arm is called regular at first.
        if opening.settings.ASKS_SPECULATIVE_ALONE and not settings.first_command:
            served = [server for server in served if server.name == "speculative"] or served
        self.key = api_key("engine.api_key_variable", settings.api_key_variable)
        self.say = opening.say
        self.servers: Servers = Servers(
            commands=[str(server.launch) for server in served if server.launch]
        )
        # The event loop has its own thread, because in a notebook the caller's thread is already running an event loop.
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="requests", daemon=True)
        self._thread.start()
        self.arms: list[ServerArm] = [ServerArm(self, server) for server in served]
        self._takes_turns = takes_turns
        try:
            self._start_first(num_blocks, most_starts)
        except BaseException:
            self.close()
            raise
        if len(self.arms) == 1 and self.arms[0].drafts:
            # A single server is measured as it is. If it drafts, its arm is called speculative.
            self.arms[0].name = "speculative"

    def _start_first(self, num_blocks: int, most_starts: int) -> None:
        """Start all servers, or only the first if they take turns, and decide how often they are started in total.

        If one of two servers ends, often for lack of memory, it is started again alone, and the two take turns from
        then on (unless `num_blocks` is 0).
        """
        began = time.perf_counter()
        try:
            self._start(self.arms[0])
        except RunError as error:
            failed = [arm for arm in self.arms if arm.ended is not None]
            is_one_of_two = len(self.arms) == 2 and len(failed) == 1
            if self._takes_turns or not num_blocks or not is_one_of_two:
                raise
            self.say(f"{error}: it is started once more, alone")
            self._stop_all()
            # Neither server runs now, and `_start` describes every arm whose `asked` is set.
            for arm in self.arms:
                arm.asked = None
            self._takes_turns = True
            began = time.perf_counter()
            self._start(failed[0])
        if not self.servers.commands:
            return
        self.setup_seconds = time.perf_counter() - began
        if self._takes_turns:
            # A run that becomes precise enough ends earlier.
            num_starts = num_blocks * len(self.arms)
            self.say(
                f"engine.blocks={num_blocks}: the servers run alternately on the same devices;"
                f" up to {num_starts} starts take about {num_starts * self.setup_seconds / 60:.1f} min"
            )
        else:
            num_blocks = self._quick_starts(most_starts, self.setup_seconds)
        if num_blocks:
            self.blocks = Blocks(num_blocks, self._restart_if_asked)

    def _quick_starts(self, most_starts: int, start_s: float) -> int:
        """Decide how often all servers are started side by side, and tell the user; 0 if they are started only once,
        because starting takes too long.
        """
        number = min(most_starts, 1 + int(_MOST_RESTARTING_S / start_s))
        if number < _FEWEST_STARTS:
            return 0
        self.say(
            f"both servers are started {counted(number, 'time')}, because two starts of one program differ:"
            f" the further starts take {(number - 1) * start_s:.0f} s in all (engine.blocks=0 starts them once)"
        )
        return number

    def run(
        self, asking: Coroutine[Any, Any, Result], look: Callable[[], None] = lambda: None
    ) -> Result:
        """Run a coroutine in the engine's thread, and return its result. If the caller is interrupted, it is cancelled.

        Args:
            look: called every `QUIET_S` seconds until the coroutine has ended.
        """
        running = asyncio.run_coroutine_threadsafe(asking, self.loop)
        try:
            while not wait([running], timeout=QUIET_S).done:
                look()
            return running.result()
        finally:
            running.cancel()

    def ensure_running(self, arm: ServerArm) -> Connection:
        """Return the arm's connection. If the arm's server is not running, all servers are ended, and those that run
        together with it are started first.
        """
        if arm.connection is None:
            self._stop_all()
            self._start(arm)
        assert arm.connection is not None
        return arm.connection

    def _start(self, arm: ServerArm) -> None:
        """Start the servers that run together with this arm's server, connect to them, and describe all servers known
        so far.
        """
        together = [arm] if self._takes_turns else self.arms
        # All are started before any is waited for, because loading a model takes long.
        for each in together:
            each.launch()
        for each in together:
            each.asked = each.identify()
        # If the servers take turns, only one of them is known at first.
        known = [each.asked for each in self.arms if each.asked is not None]
        models = [asked.model for asked in known]
        # If the user named a model, other weights in the other arm may be intended.
        if all(each.served.model is None for each in self.arms):
            check_same_weights(models)
        for each in together:
            each.connect()
        devices = [each.devices for each in self.arms if each.asked is not None]
        self.servers = dataclasses.replace(
            self.servers,
            names=list(dict.fromkeys(asked.server for asked in known if asked.server)),
            models=list(dict.fromkeys(map(str, models))),
            # Empty if the devices of any server are not known.
            devices=list(dict.fromkeys(itertools.chain(*devices))) if all(devices) else [],
        )

    def _restart_if_asked(self, arm: Arm) -> None:
        """Begin a block: if the arm's server has answered a question since its start, end all servers. `ensure_running`
        then starts those that are needed next.
        """
        assert isinstance(arm, ServerArm)
        if arm.connection is not None and arm.connection.was_asked:
            self._stop_all()

    def _stop_all(self) -> None:
        for arm in self.arms:
            arm.stop()

    def close(self) -> None:
        self._stop_all()
        # This closes the generators of answers that were not read to their end.
        self.run(self.loop.shutdown_asyncgens())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class ServerArm(Arm):
    """An arm whose requests go to one server.

    Args:
        engine: the engine; it starts this arm's server if the server is not running.
        served: the address of the server, or how it is started.

    Attributes:
        process: the server that was started here, until `stop`; None for a server that was already running.
        asked: the server and its model, as they were last identified; None before `identify`.
        connection: the connection, from `connect` until `stop`; otherwise None.
        drafts: whether the server speculates, as far as its first answer and its counters show.
        devices: the devices on which it computes, as `connect` found them; empty if they are not known.
        requests: records of the last question's requests.
    """

    def __init__(self, engine: ServerEngine, served: Served) -> None:
        self.name = served.name
        self.served = served
        self.process: StartedServer | None = None
        self.asked: AskedServer | None = None
        self.connection: Connection | None = None
        self.drafts = False
        self.devices: Sequence[str] = ()
        self.requests: Sequence[RequestRecord] = ()
        self._takes_tools = False
        # `CounterPage.between` of the last connection; the next connection adds to it.
        self._between: Counts | None = Counts()
        self._engine = engine
        self._settings = ServerSettings.of(engine.opening.settings)

    @property
    def url(self) -> str:
        """The address of the server's API."""
        return self.process.url if self.process is not None else self.served.url or ""

    def launch(self) -> None:
        """Start the server, if it is to be started here."""
        if self.served.launch is not None:
            self.process = StartedServer(self.served.launch)

    @property
    def ended(self) -> str | None:
        """The reason why a server that was started here has ended; None while it runs, and for any other server."""
        return self.process.ended if self.process else None

    def identify(self) -> AskedServer:
        """Wait until the server is ready, and choose the name of the model in requests.

        Raises:
            SettingError: if a server that was started here refuses the key, if the server does not serve the model, or
                if its context has no room for the prompts.
            RunError: if the server was started here, and has ended or is not ready in time; or if it redirects to
                another server.
        """
        engine = self._engine
        opening = engine.opening
        served = self.served
        if self.process is not None:
            self.process.wait_until_ready(engine.say, engine.key)
        report = server_report(self.url, engine.key)
        command = served.launch.command if served.launch else None
        shown_server = served.setting if self.process else f"{served.setting}={self.url}"
        # The arm of a single server may be called regular, too; its model is set by `engine.model`.
        is_regular_of_two = served.name == "regular" and len(engine.arms) > 1
        model = choose_model(
            report,
            opening.settings.model.repository,
            name=served.model,
            typed_model=None if command is None else command.model,
            model_setting="engine.regular_model" if is_regular_of_two else "engine.model",
            shown_server=shown_server,
        )
        max_new_tokens = opening.decoding.max_new_tokens
        num_tokens = opening.longest_prompt + max_new_tokens
        knows_tokens = not isinstance(opening.planned.tokenizer, TextTokenizer)
        if knows_tokens and num_tokens > (model.context or math.inf):
            context = f"{shown_server} has a context of {model.context} tokens"
            rule = f"leaves too little room: {context}, and a prompt has {opening.longest_prompt}"
            raise SettingError("decoding.max_new_tokens", rule, max_new_tokens)
        in_flight = opening.batch_size
        slots = report.about.get("/props total_slots") if report else None
        # Said at the first of several starts only.
        if self.asked is None and isinstance(slots, int) and slots < in_flight:
            room = counted(slots, "slot")
            engine.say(
                f"{shown_server} has {room} for {in_flight} requests in flight: the others wait"
            )
        typed_dialect = UNKNOWN_DIALECT if command is None else command.dialect
        dialect = dialect_of(model.owner or typed_dialect.name, self._settings.dialect)
        server = (report and dialect.named(report.about)) or None
        return AskedServer(model, dialect, server, slots if isinstance(slots, int) else math.inf)

    def connect(self) -> None:
        """Find the form of requests that the server accepts, and set `connection`, `traits`, `drafts` and `devices`.

        Raises:
            RunError: if the server answers no request in any form.
        """
        engine = self._engine
        assert self.asked is not None
        asking = connect(engine.opening, self.served, self.url, engine.key, self.asked, self._say)
        waiting = f"waiting for an answer from {self.url}"
        try:
            self.connection = engine.run(asking, lambda: self._say(waiting))
        except RunError as error:
            ended = self.process.why_ended() if self.process else None
            raise RunError(ended or str(error)) from error
        self.connection.counters.between = self._between
        self.traits = self.connection.traits
        self.drafts = self.connection.counters.show_drafts() or self.connection.drafts
        self.devices = devices_of(self.url, self.process.pid if self.process else None)

    def stop(self) -> None:
        """Close the connection, and end the server if it was started here."""
        if self.connection is not None:
            self._between = self.connection.counters.between
            self._engine.run(self.connection.client.aclose())
            self.connection = None
        if self.process is not None:
            self.process.stop()
            self.process = None

    def between_questions(self) -> Counts | None:
        # Counters of a server that answers for both arms also count the other arm's questions.
        urls = [arm.served.url for arm in self._engine.arms]
        if self.served.url is not None and urls.count(self.served.url) > 1:
            return None
        if self.connection is None:
            return self._between
        self.connection.counters.look()
        return self.connection.counters.between

    def _say(self, message: str) -> None:
        self._engine.say(f"{self.name}: {message}")

    @property
    def failure(self) -> str | None:
        if self.connection is None:
            return None
        # A server that was started here may have ended; otherwise the sender may have given up.
        given_up = self.connection.sender.given_up
        ended = self.ended
        if ended is None and given_up and self.process:
            ended = self.process.why_ended()
        return ended or given_up

    def answer(
        self,
        requests: Sequence[Request],
        in_flight: int,
        extra: Sequence[Request] = (),
        note_ended: NoteEnded | None = None,
    ) -> Answered:
        """Send requests to the server, and record the answers; see `Arm.answer`.

        The record of a request that fails contains the tokens that arrived, and the error.
        """
        connection = self._engine.ensure_running(self)
        connection.was_asked = True
        self._require_tools(connection, requests)
        time.sleep(_REST_S)
        connection.counters.begin()
        self.requests = [request.record() for request in requests]
        arrivals: list[Arrival] = []
        outgoing = []
        for row, (request, record) in enumerate(zip(requests, self.requests, strict=True)):
            body = connection.form.body(request)
            # A stop text may end the answer before its first token.
            may_be_empty = request.may_be_empty or "stop" in body
            # All of them add to the same list of arrivals.
            outgoing.append(Outgoing(body, record, row, arrivals, may_be_empty=may_be_empty))
        assert self.asked is not None
        sender = connection.sender
        further = connection.further(extra)
        asking = send_in_turn(sender, outgoing, further, in_flight, self.asked.slots)
        # `_note_progress` reports silence since the last event, so the question itself counts as one.
        sender.last_event = time.perf_counter()
        load = self._engine.run(asking, lambda: self._note_progress(sender, note_ended))
        num_left = sum(record.was_left for record in [*self.requests, *load.extra])
        return Answered(
            requests=self.requests,
            # Without the part of the time that extra requests took.
            seconds=load.seconds * load.share,
            arrivals=arrivals,
            load=load,
            counted=connection.counters.end(num_left),
        )

    def _require_tools(self, connection: Connection, requests: Sequence[Request]) -> None:
        """Raise a SettingError if the server's chat template leaves tools out, so that a prompt with tools is not
        longer than the same prompt without.

        Two requests find this out, before the first question with tools.
        """
        chats = (request.chat for request in requests if request.chat and request.chat.tools)
        offered = next(chats, None)
        if self._takes_tools or not connection.form.chat or offered is None:
            return
        decoding = DecodingSettings(max_new_tokens=1, temperature=0)
        hello = ({"role": "user", "content": "Hello"},)
        lengths = []
        # Between `begin` and `end`, so that these requests do not count as other clients'.
        connection.counters.begin()
        for chat in (Chat(hello, offered.tools), Chat(hello)):
            probe = Request([0], decoding, seed=0, index=0, chat=chat)
            record = probe.record()
            self._engine.run(connection.sender.send(Outgoing(connection.form.body(probe), record)))
            lengths.append(record.num_read)
        connection.counters.end(0)
        if lengths[0] is not None and lengths[0] == lengths[1]:
            rule = f"have tools, and the chat template of the {self.name} server shows none: {self.url}"
            raise SettingError("prompts", rule)
        self._takes_tools = True

    @property
    def scores(self) -> TextScores | None:
        asked = self.asked
        if asked is None or asked.dialect.scoring is None:
            return None

        def score(texts: Texts, num_top: int, num_in_flight: int) -> list[list[Likeliest]]:
            connection = self._engine.ensure_running(self)
            scorer = TextScorer(connection.client, asked, num_top)
            return self._engine.run(scorer.score_all(texts, num_in_flight))

        return score

    def _note_progress(self, sender: Sender, note_ended: NoteEnded | None) -> None:
        """Report how many requests have ended, and print a message if nothing has arrived for `QUIET_S` seconds."""
        # A record gets its seconds when its request ends.
        num_ended = sum(request.seconds > 0 for request in self.requests)
        if note_ended is not None:
            note_ended(num_ended)
        silent_s = time.perf_counter() - sender.last_event
        if silent_s >= QUIET_S and sender.num_in_flight:
            self._say(
                f"nothing from {self.url} for {silent_s:.0f} s;"
                f" {num_ended} of {len(self.requests)} requests have ended, and"
                f" engine.timeout_s={self._settings.timeout_s:g} ends those that have not"
            )
