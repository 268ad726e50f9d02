"""`engine=simulated`: an engine that only simulates time. It is also an example of an engine in a file
(`engine=./my_engine.py:Mine`).

The settings contain the cost of each pass, and the engine adds these costs up on its own clock, without waiting. Its
tokens mean nothing. It has two uses: to learn to read a page whose true figures are known, and to test the instrument.
For example: `harness latency engine=simulated engine.step_ms=20 engine.acceptance=0.8 K=4`.

An engine needs three classes: its settings; its record, with facts that commands need before they open the engine; and
the opened engine, with an arm for each way of answering. In this engine, all requests in flight form a batch. A pass of
the target verifies the tokens of all rows. When a row ends, the next waiting request gets its place. A prompt is read
in a separate pass, during which all other rows wait.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.config.engines import EngineSettings
from harness.config.model_names import SERVED
from harness.config.run import RepeatedSettings, RunSettings
from harness.config.settings import ModelSettings, require
from harness.engines.protocol import Answered, Arm, Blocks, Engine, NoteEnded, Request
from harness.engines.record import EngineRecord, Opening
from harness.engines.requests import Load, RequestRecord
from harness.results.schema import SIMULATED

_MOST_TOKENS = 100_000
_MOST_MS = 1e7
# The largest values of settings. With larger ones, numbers would overflow or a run would never end.
_BOUNDS: Mapping[Sequence[str], float] = {
    ("step_ms", "width_ms", "row_ms", "draft_ms", "prompt_ms", "first_ms", "stall_ms"): _MOST_MS,
    ("prompts_differ", "noise", "start_noise"): 10,
    ("drift",): 100,
    ("stall_every", "blocks"): 1e6,
}


@dataclass(frozen=True, kw_only=True)
class SimulatedSettings(EngineSettings):
    """Settings of `engine=simulated`: what an iteration costs and yields, and what disturbs it.

    Attributes:
        step_ms: time of a regular step: one pass of the target over one token of one row.
        width_ms: time added to a pass for each draft token of a row that it verifies.
        row_ms: time added to a pass for each further row in flight.
        jumps: milliseconds added to a pass from a number of tokens per row on: `{9: 8.0}` adds 8 to passes over at
            least nine tokens of a row.
        draft_ms: time to draft one token, for all rows together.
        prompt_ms: time to read one token of a prompt.
        first_ms: time added to each prompt, as by a network.
        acceptance: probability that a draft token is accepted if the earlier ones were: one number, or one for each
            position.
        prompts_differ: how much prompts differ in acceptance: the standard deviation of its log-odds.
        lengths: lengths of the answers in tokens, used in turn, if answers may end by themselves
            (`decoding.ignore_eos=false`).
        noise: standard deviation of the logarithm of each iteration's time.
        start_noise: standard deviation of the logarithm of a factor on all times, drawn anew for each start of an arm.
        stall_every: one in this many iterations stalls, at random; 0 for none.
        stall_ms: how long a stall lasts.
        drift: share by which everything is slower after a minute of the engine's clock.
        blocks: number of starts of each arm; 0 for one start, without blocks.
    """

    name: str = SIMULATED
    step_ms: float = 20.0
    width_ms: float = 0.5
    row_ms: float = 0.5
    jumps: Mapping[int, float] | None = None
    draft_ms: float = 2.0
    prompt_ms: float = 0.1
    first_ms: float = 5.0
    acceptance: float | tuple[float, ...] = 0.8
    prompts_differ: float = 0.3
    lengths: tuple[int, ...] = ()
    noise: float = 0.02
    start_noise: float = 0.0
    stall_every: int = 0
    stall_ms: float = 0.0
    drift: float = 0.0
    blocks: int = 0

    def __post_init__(self) -> None:
        require(self.step_ms >= 1e-6, "step_ms", "must be at least 1e-6", self.step_ms)
        for names, most in _BOUNDS.items():
            for name in names:
                value = getattr(self, name)
                rule = f"must be from 0 to {most:g}"
                require(value is None or 0 <= value <= most, name, rule, value)
        for width, ms in (self.jumps or {}).items():
            rule = f"must be milliseconds from 0 to {_MOST_MS:g} by width, from 1 on"
            require(width >= 1 and 0 <= ms <= _MOST_MS, "jumps", rule, f"{{{width}: {ms}}}")
        require(
            bool(self.acceptance_by_position), "acceptance", "must have a rate", self.acceptance
        )
        for chance in self.acceptance_by_position:
            require(0 <= chance <= 1, "acceptance", "must be from 0 to 1", chance)
        for length in self.lengths:
            require(length >= 1, "lengths", "must be at least 1", length)

    @property
    def acceptance_by_position(self) -> Sequence[float]:
        """The acceptance rate at each position. The last rate is for all further positions, too."""
        return (self.acceptance,) if isinstance(self.acceptance, int | float) else self.acceptance

    def pass_ms(self, width: int, num_rows: int = 1) -> float:
        """Return the milliseconds of a pass of the target over `width` tokens of each row."""
        jumps = sum(ms for first, ms in (self.jumps or {}).items() if width >= first)
        width_ms = num_rows * (width - 1) * self.width_ms
        return self.step_ms + (num_rows - 1) * self.row_ms + width_ms + jumps

    def iteration_ms(self, num_draft_tokens: int, num_rows: int = 1) -> float:
        """Return the milliseconds of an iteration that drafts this many tokens for each row and verifies them.

        This is the true time according to the settings, without noise.
        """
        return num_draft_tokens * self.draft_ms + self.pass_ms(num_draft_tokens + 1, num_rows)


class Simulated(EngineRecord):
    """The record of the engine, which has made-up costs and acceptance, and its own clock."""

    name = SIMULATED
    summary = (
        "made-up costs and acceptance on a clock of its own, to learn and to test: no measurement"
    )
    settings = SimulatedSettings
    in_process = False
    queues = True
    own_clock = True
    # Not read: the settings of the engine make up what is proposed.
    default_draft = "lookup"

    def check(self, run: RunSettings) -> None:
        super().check(run)
        number = run.decoding.max_new_tokens
        rule = f"must be at most {_MOST_TOKENS:,}: each is simulated"
        require(number <= _MOST_TOKENS, "decoding.max_new_tokens", rule, number)

    def adapted(self, run: RunSettings) -> RunSettings:
        """Return the run's settings without the names of models, which would make the run look like a measurement of
        these models.
        """
        run = dataclasses.replace(run, model=ModelSettings(name=SIMULATED, repository=SERVED))
        if run.draft is not None:
            rule = "is not read: engine.acceptance and engine.draft_ms make up the draft; draft=none leaves it out"
            require(run.draft.name == self.default_draft, "draft", rule, run.draft.name)
            run = dataclasses.replace(run, draft=dataclasses.replace(run.draft, name=SIMULATED))
        return run

    def columns(self, run: RunSettings) -> Mapping[str, Any]:
        if run.draft is None:
            return {}
        return {"num_draft_tokens": run.decoding.num_draft_tokens, "draft_method": SIMULATED}

    def open(self, opening: Opening) -> Engine:
        return SimulatedEngine(opening)


@dataclass
class _Clock:
    """The clock that all arms of an engine share."""

    now_s: float = 0.0
    noise: random.Random = field(default_factory=random.Random)


class SimulatedEngine(Engine):
    """Both arms (only the regular one without a draft), which share a clock."""

    def __init__(self, opening: Opening) -> None:
        run = opening.settings
        settings = run.engine
        assert isinstance(settings, SimulatedSettings)
        # The noise depends on the number of the repetition, because repetitions may have the same seed.
        repeat = run.repeat if isinstance(run, RepeatedSettings) else 1
        # It also depends on the settings, so that the jobs of a sweep have different noise.
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
    """An arm of the simulated engine.

    Attributes:
        factor: a factor on all of the arm's times, which changes with each start of the arm.
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
        clock = self.clock
        batch = _Batch(self, requests[0], extra)
        began_s = clock.now_s
        batch.free.extend([began_s] * in_flight)
        rows = [_Row.of(self.settings, request, began_s) for request in requests]
        batch.answer(rows)
        seconds = clock.now_s - began_s
        load = Load(
            seconds,
            request_seconds=batch.in_flight_s(began_s),
            share=batch.own_arrivals / batch.all_arrivals,
            extra=[row.record for row in batch.rows if row.is_extra],
        )
        records = [row.record for row in rows]
        return Answered(requests=records, seconds=seconds * load.share, load=load)


@dataclass
class _Row:
    """A request in flight.

    Attributes:
        asked: the request.
        record: the record of its answer.
        length: the number of tokens of its answer.
        log_odds: the amount by which the log-odds of acceptance differ for this prompt.
        coins: random numbers that decide whether its draft tokens are accepted.
        sent_s: the time at which it was sent, on the engine's clock.
        is_extra: whether it is not part of the question, and only keeps up the load.
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
        """Make the row of a request, whose acceptance depends only on the seed and the prompt: not on other requests,
        nor on their order.
        """
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
        """The number of tokens that are still to be generated."""
        return self.length - self.record.num_tokens

    def tokens(self, number: int) -> list[int]:
        """Return the next tokens of the answer. They repeat the prompt's tokens, so both arms have equal texts."""
        prompt = self.asked.prompt
        first = self.record.index + self.record.num_tokens
        return [prompt[(first + step) % len(prompt)] for step in range(number)]


class _Batch:
    """The requests of a question, and extra requests that only keep up the load.

    Attributes:
        waiting, running, ended: the rows in each state.
        free: for each free place in the batch, the time since which it has been free.
        own_arrivals, all_arrivals: the numbers of arrivals for the question's requests, and for all requests.
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
        self._num_extra = 0

    @property
    def rows(self) -> list[_Row]:
        return [*self.ended, *self.running, *self.waiting]

    def answer(self, own: Sequence[_Row]) -> None:
        """Answer the question's own requests. When they have ended, extra requests may still be in flight."""
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
        """Return the summed seconds that all requests have been in flight since `began_s`, including requests that have
        not ended.
        """
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
        """Read the prompts that have been sent, while there are free places."""
        settings, clock = self._settings, self._clock
        while self.free and self.free[0] <= clock.now_s:
            if self.waiting and self.waiting[0].sent_s <= clock.now_s:
                row = self.waiting.popleft()
            elif self._extra and not self.waiting:
                row = self._extra_row(clock.now_s)
            else:
                break
            # The request counts as sent at the time when its place became free. Since then it has waited, while the
            # prompts before it were read.
            row.sent_s = self.free.popleft()
            self._pass(settings.first_ms + settings.prompt_ms * row.record.num_prompt_tokens)
            self._give(row, 1)
            # Start at most one extra request per iteration, so that running rows proceed.
            if row.is_extra:
                break

    def _iterate(self) -> None:
        """Draft tokens for all running rows, and verify them."""
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
        """Move the clock on by the time of a pass, with drift and noise."""
        drift = 1 + self._settings.drift * self._clock.now_s / 60
        noise = math.exp(self._clock.noise.gauss(0, self._settings.noise))
        self._clock.now_s += ms / 1000 * self._arm.factor * drift * noise

    def _give(self, row: _Row, num_tokens: int) -> None:
        """Add the next tokens of a request, which then continues or ends."""
        row.record.add(row.tokens(num_tokens), self._clock.now_s - row.sent_s)
        if not row.is_extra:
            self.own_arrivals += 1
        self.all_arrivals += 1
        if row.num_left > 0:
            self.running.append(row)
            return
        self.ended.append(row)
        self.free.append(self._clock.now_s)

    def _extra_row(self, sent_s: float) -> _Row:
        asked = self._extra[self._num_extra % len(self._extra)]
        self._num_extra += 1
        return _Row.of(self._settings, asked, sent_s, is_extra=True)


def _num_accepted(settings: SimulatedSettings, row: _Row, num_proposed: int) -> int:
    """Draw how many of a row's draft tokens are accepted in an iteration."""
    for index in range(num_proposed):
        rate = settings.acceptance_by_position[min(index, len(settings.acceptance_by_position) - 1)]
        if 0 < rate < 1:
            odds = rate / (1 - rate) * math.exp(row.log_odds)
            rate = odds / (1 + odds)
        if row.coins.random() >= rate:
            return index
    return num_proposed
