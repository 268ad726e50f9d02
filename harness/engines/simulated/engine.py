"""How `engine=simulated` answers: a continuous batch on the engine's own clock.

Requests in flight share the engine: a pass of the target verifies the tokens of all rows, a row that has ended makes
room for one that waits, and a prompt is read in a pass of its own, during which all others wait.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from harness.config.run import RepeatedSettings
from harness.engines.protocol import Answered, Arm, Blocks, Engine, NoteEnded, Request
from harness.engines.rates import arrival_times, has_built_up
from harness.engines.record import Opening
from harness.engines.requests import Load, RequestRecord
from harness.engines.simulated.settings import SimulatedSettings
from harness.results.schema import SIMULATED


@dataclass
class _Clock:
    """Seconds that have passed on an engine, of all arms."""

    now_s: float = 0.0
    noise: random.Random = field(default_factory=random.Random)


class SimulatedEngine(Engine):
    """Both arms, or the regular one, on one clock."""

    def __init__(self, opening: Opening) -> None:
        run = opening.settings
        settings = run.engine
        assert isinstance(settings, SimulatedSettings)
        # Runs with the same seed and the same texts are other runs.
        repeat = run.repeat if isinstance(run, RepeatedSettings) else 1
        # So are those with other settings: the jobs of a sweep do not share their noise.
        circumstances = f"{run.engine} {run.decoding} {run.batch_size}"
        clock = _Clock(noise=random.Random(f"noise {run.seed} {repeat} {circumstances}"))
        self.arms = [SimulatedArm(name, settings, clock) for name in run.arms]
        if settings.blocks:
            self.blocks = Blocks(settings.blocks, _start_again)
        self.runner = SIMULATED


def _start_again(arm: Arm) -> None:
    assert isinstance(arm, SimulatedArm)
    arm.start()


class SimulatedArm(Arm):
    """One arm.

    Attributes:
        factor: of all its times, since its last start.
    """

    def __init__(self, name: str, settings: SimulatedSettings, clock: _Clock) -> None:
        self.name = name
        self.settings = settings
        self.clock = clock
        self.start()

    def start(self) -> None:
        self.factor = math.exp(self.clock.noise.gauss(0, self.settings.start_noise))

    def answer(
        self,
        requests: Sequence[Request],
        in_flight: int,
        extra: Sequence[Request] = (),
        note_ended: NoteEnded | None = None,
    ) -> Answered:
        clock, rate = self.clock, self.settings.rate
        batch = _Batch(self, requests[0], extra)
        if rate is not None and extra:
            batch.build_up(rate)
        began_s = clock.now_s
        times = [0.0] * len(requests)
        if rate is not None:
            times = arrival_times(requests, rate)
            if extra:
                # Behind the last request that counts, so that the load does not drain.
                batch.send_extra_again(began_s + times[-1], rate)
        else:
            batch.free.extend([began_s] * in_flight)
        rows = [
            _Row.of(self.settings, request, began_s + time_s)
            for request, time_s in zip(requests, times, strict=True)
        ]
        batch.answer(rows)
        seconds = clock.now_s - began_s
        load = Load(
            seconds,
            request_seconds=batch.in_flight_s(began_s),
            share=batch.own_arrivals / batch.all_arrivals,
            extra=[row.record for row in batch.rows if row.is_extra],
            offered_s=times[-1] if rate is not None else 0.0,
        )
        records = [row.record for row in rows]
        return Answered(requests=records, seconds=seconds * load.share, load=load)


@dataclass
class _Row:
    """A request in flight.

    Attributes:
        log_odds: added to the log-odds of acceptance, of its prompt.
        coins: of its draft tokens.
        sent_s: on the engine's clock.
        is_extra: whether it only keeps up the load.
    """

    asked: Request
    record: RequestRecord
    length: int
    log_odds: float
    coins: random.Random
    sent_s: float
    is_extra: bool

    @classmethod
    def of(
        cls, settings: SimulatedSettings, request: Request, sent_s: float, *, is_extra: bool = False
    ) -> _Row:
        """Draw an answer, which follows from its prompt in any order and any company."""
        decoding = request.decoding
        length = decoding.max_new_tokens
        if settings.lengths and not decoding.ignore_eos:
            length = min(length, settings.lengths[request.index % len(settings.lengths)])
        generator = random.Random(f"{request.seed} prompt {request.index}")
        return cls(
            request,
            request.record(),
            length,
            log_odds=generator.gauss(0, settings.prompts_differ),
            coins=generator,
            sent_s=sent_s,
            is_extra=is_extra,
        )

    @property
    def num_left(self) -> int:
        """Tokens until its end."""
        return self.length - self.record.num_tokens

    def tokens(self, number: int) -> list[int]:
        """The next tokens of the answer: those of its prompt again and again, the same in both arms."""
        prompt = self.asked.prompt
        first = self.record.index + self.record.num_tokens
        return [prompt[(first + step) % len(prompt)] for step in range(number)]


class _Batch:
    """The requests of a lap, and those that only keep up its load.

    Attributes:
        waiting, running, ended: rows by how far they are.
        free: since when each slot has been free; none at a rate.
        own_arrivals, all_arrivals: numbers of the requests that count, and of all, since these were sent.
    """

    def __init__(self, arm: SimulatedArm, first: Request, extra: Sequence[Request]) -> None:
        self._arm = arm
        self._settings = arm.settings
        self._clock = arm.clock
        self._extra = extra
        drafts = arm.name == "speculative"
        self._num_draft_tokens = first.decoding.most_draft_tokens if drafts else 0
        self.waiting: deque[_Row] = deque()
        self.running: list[_Row] = []
        self.ended: list[_Row] = []
        self.free: deque[float] = deque()
        self.own_arrivals = self.all_arrivals = 0
        # When requests that only keep up the load come, at a rate.
        self._gaps = random.Random(f"extra {first.seed} {first.index}")
        self._next_extra_s = math.inf
        self._num_extra = 0

    @property
    def rows(self) -> list[_Row]:
        return [*self.ended, *self.running, *self.waiting]

    def build_up(self, rate: float) -> None:
        """Answer requests that only keep up the load until it has built up, as it has with a server before the first
        request that counts.
        """
        self._next_extra_s = self._clock.now_s
        most_in_flight = 0
        while not has_built_up(len(self.ended), most_in_flight):
            self._read_prompts()
            most_in_flight = max(most_in_flight, len(self.running) + len(self.waiting))
            if self.running:
                self._iterate()
            elif not self.waiting:
                self._clock.now_s = max(self._clock.now_s, self._next_extra_s)

    def send_extra_again(self, after_s: float, rate: float) -> None:
        """The next request that only keeps up the load comes behind this time."""
        self._next_extra_s = after_s + self._gaps.expovariate(rate)

    def answer(self, own: Sequence[_Row]) -> None:
        """Answer the requests that count."""
        self.waiting.extend(own)
        self.own_arrivals = self.all_arrivals = 0
        while any(row.num_left > 0 for row in own):
            self._read_prompts()
            if self.running:
                self._iterate()
            elif self.free:
                self._clock.now_s = max(self._clock.now_s, self.free[0])
            elif self.waiting:
                self._clock.now_s = max(self._clock.now_s, self.waiting[0].sent_s)

    def in_flight_s(self, began_s: float) -> float:
        """Seconds of all requests since a time, also of those that have not ended."""
        now_s = self._clock.now_s
        seconds = 0.0
        for row in self.ended:
            ended_s = row.sent_s + row.record.seconds
            if ended_s > began_s:
                seconds += min(ended_s, now_s) - max(row.sent_s, began_s)
        for row in (*self.running, *self.waiting):
            seconds += max(0.0, now_s - max(row.sent_s, began_s))
        return seconds

    def _read_prompts(self) -> None:
        """Read the prompts that have come, as far as there is room."""
        settings, clock = self._settings, self._clock
        rate = settings.rate
        while rate is not None or (self.free and self.free[0] <= clock.now_s):
            while self._next_extra_s <= clock.now_s:
                assert rate is not None
                self.waiting.append(self._extra_row(self._next_extra_s))
                self._next_extra_s += self._gaps.expovariate(rate)
            if self.waiting and self.waiting[0].sent_s <= clock.now_s:
                row = self.waiting.popleft()
            elif self._extra and not self.waiting and rate is None:
                row = self._extra_row(clock.now_s)
            else:
                break
            if rate is None:
                # Sent when a slot became free; then it waited for the prompts before it.
                row.sent_s = self.free.popleft()
            self._pass(settings.first_ms + settings.prompt_ms * row.record.num_prompt_tokens)
            self._give(row, 1)
            # At most one of these per pass, so that running rows proceed.
            if row.is_extra:
                break

    def _iterate(self) -> None:
        """Draft tokens of all rows and verify them."""
        settings, clock = self._settings, self._clock
        # The last token of an answer is never drafted.
        proposals = [min(self._num_draft_tokens, row.num_left - 1) for row in self.running]
        self._pass(settings.iteration_ms(max(proposals), len(self.running)))
        if settings.stall_every and clock.noise.random() * settings.stall_every < 1:
            clock.now_s += settings.stall_ms / 1000
        rows = self.running
        self.running = []
        for row, num_proposed in zip(rows, proposals, strict=True):
            num_accepted = _num_accepted(settings, row, num_proposed)
            if self._arm.name == "speculative":
                row.record.outcomes.append((num_proposed, num_accepted))
            self._give(row, num_accepted + 1)

    def _pass(self, ms: float) -> None:
        """Let a pass take its time."""
        drift = 1 + self._settings.drift * self._clock.now_s / 60
        noise = math.exp(self._clock.noise.gauss(0, self._settings.noise))
        self._clock.now_s += ms / 1000 * self._arm.factor * drift * noise

    def _give(self, row: _Row, num_tokens: int) -> None:
        """The next tokens of a request, after which it goes on or ends."""
        row.record.add(row.tokens(num_tokens), self._clock.now_s - row.sent_s)
        if not row.is_extra:
            self.own_arrivals += 1
        self.all_arrivals += 1
        if row.num_left > 0:
            self.running.append(row)
            return
        self.ended.append(row)
        if self._settings.rate is None:
            self.free.append(self._clock.now_s)

    def _extra_row(self, sent_s: float) -> _Row:
        asked = self._extra[self._num_extra % len(self._extra)]
        self._num_extra += 1
        return _Row.of(self._settings, asked, sent_s, is_extra=True)


def _num_accepted(settings: SimulatedSettings, row: _Row, num_proposed: int) -> int:
    """How many of the draft tokens of an iteration are accepted."""
    for index in range(num_proposed):
        rate = settings.acceptance_by_position[min(index, len(settings.acceptance_by_position) - 1)]
        if 0 < rate < 1:
            odds = rate / (1 - rate) * math.exp(row.log_odds)
            rate = odds / (1 + odds)
        if row.coins.random() >= rate:
            return index
    return num_proposed
