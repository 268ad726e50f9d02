"""An engine with a clock of its own: answers take the time that planted costs say, and nobody waits for them.

It generates nothing that means anything. It is for learning to read a page whose truth is known, and the test bench of
the instrument: `harness latency engine=simulated engine.step_ms=20 engine.acceptance=0.8 K=4`. Needs no torch and no
model.

Requests in flight share the engine as in continuous batching: a pass of the target verifies the tokens of all rows, a
row that has ended makes room for one that waits, and a prompt is read in a pass of its own, during which all others
wait.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from harness.config.engines import EngineSettings
from harness.config.model_names import SERVED
from harness.config.run import RepeatedSettings, RunSettings
from harness.config.settings import ModelSettings, require
from harness.engines.record import EngineRecord, Opening
from harness.results.schema import SIMULATED

if TYPE_CHECKING:
    from harness.config.run import RunSettings
    from harness.engines.protocol import Engine, Request
    from harness.engines.requests import RequestRecord

# What rows call engine, model, draft and method.
NAME = SIMULATED


@dataclass(frozen=True, kw_only=True)
class SimulatedSettings(EngineSettings):
    """Settings of `engine=simulated`: what an iteration costs and yields, and what disturbs it.

    Attributes:
        step_ms: a regular step, one pass of the target over one token of one row.
        width_ms: added to a pass for each further token of a row that it verifies, K in all.
        row_ms: added to a pass for each further row in flight.
        jumps: milliseconds that a pass takes more from a width on: `{9: 8.0}` of nine tokens of a row and more.
        draft_ms: drafting one token, of all rows together.
        prompt_ms: reading one token of a prompt.
        first_ms: added to each prompt, such as what a request takes on its way.
        reads_together: whether prompts that wait are read in one pass, behind which all have their first token, as in
            llama-server; else one after the other.
        gap_ms: from the end of an answer until the next request comes, where some are kept in flight: others go on.
        acceptance: the chance that a draft token is accepted if those before it were: one number, or one for each
            position.
        prompts_differ: how far prompts differ in that, as a standard deviation of its log-odds.
        lengths: tokens of answers where they may end by themselves (`decoding.ignore_eos=false`), one after the other.
        noise: standard deviation of the logarithm of each iteration's time.
        start_noise: the same from start to start, of each arm.
        stall_every: one in so many iterations stalls; 0 for none.
        stall_ms: how long a stall lasts.
        drift: how much slower everything is after a minute of the engine's clock, as a share.
        blocks: how often each arm is started; 0 for once.
        rate: requests per second on average, at random (Poisson) times; None to keep `batch_size` in flight.
        slo: as of `engine=server`.
    """

    name: str = NAME
    step_ms: float = 20.0
    width_ms: float = 0.5
    row_ms: float = 0.5
    jumps: Mapping[int, float] | None = None
    draft_ms: float = 2.0
    prompt_ms: float = 0.1
    first_ms: float = 5.0
    reads_together: bool = False
    gap_ms: float = 0.0
    acceptance: float | tuple[float, ...] = 0.8
    prompts_differ: float = 0.3
    lengths: tuple[int, ...] = ()
    noise: float = 0.02
    start_noise: float = 0.0
    stall_every: int = 0
    stall_ms: float = 0.0
    drift: float = 0.0
    blocks: int = 0
    rate: float | None = None
    slo: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        for name in ("step_ms", "rate"):
            value = getattr(self, name)
            require(value is None or value > 0, name, "must be positive", value)
        for name in (
            *(
                "width_ms",
                "row_ms",
                "draft_ms",
                "prompt_ms",
                "first_ms",
                "gap_ms",
                "prompts_differ",
            ),
            *("noise", "start_noise", "stall_every", "stall_ms", "drift", "blocks"),
        ):
            value = getattr(self, name)
            require(value >= 0, name, "must not be negative", value)
        for rate in self.rates:
            require(0 <= rate <= 1, "acceptance", "must be from 0 to 1", rate)
        for length in self.lengths:
            require(length >= 1, "lengths", "must be at least 1", length)

    @property
    def rates(self) -> Sequence[float]:
        """Chances of acceptance by position; the last one is that of all further ones."""
        return (self.acceptance,) if isinstance(self.acceptance, int | float) else self.acceptance

    @property
    def has_rate(self) -> bool:
        return self.rate is not None

    @property
    def fills_in_k(self) -> bool:
        """Like a server that is started with the K of the run."""
        return True

    def pass_ms(self, width: int, num_rows: int = 1) -> float:
        """A pass of the target that verifies so many tokens of each row."""
        jumps = sum(ms for first, ms in (self.jumps or {}).items() if width >= int(first))
        of_widths = num_rows * (width - 1) * self.width_ms
        return self.step_ms + (num_rows - 1) * self.row_ms + of_widths + jumps

    def iteration_ms(self, num_draft_tokens: int, num_rows: int = 1) -> float:
        """An iteration that drafts so many tokens of each row and verifies them: the planted truth."""
        return num_draft_tokens * self.draft_ms + self.pass_ms(num_draft_tokens + 1, num_rows)


class Simulated(EngineRecord):
    """Planted costs and acceptance, on a clock of its own."""

    name = NAME
    summary = (
        "planted costs and acceptance on a clock of its own, to learn and to test: no measurement"
    )
    settings = SimulatedSettings
    computes_here = False
    queues = True
    own_clock = True

    def adapted(self, run: RunSettings) -> RunSettings:
        """Without the models, whose names would look like those of a measurement."""
        run = dataclasses.replace(run, model=ModelSettings(name=NAME, repository=SERVED))
        if run.draft is not None:
            run = dataclasses.replace(run, draft=dataclasses.replace(run.draft, name=NAME))
        return run

    def columns(self, run: RunSettings) -> Mapping[str, Any]:
        if run.draft is None:
            return {}
        return {"num_draft_tokens": run.decoding.num_draft_tokens, "draft_method": NAME}

    def open(self, opening: Opening) -> Engine:
        return _engine(opening)


@dataclass
class _Row:
    """A request in flight.

    Attributes:
        log_odds: added to the log-odds of acceptance, of its prompt.
        coins: of its draft tokens.
        sent_s: on the engine's clock.
        place: of the request among those that are answered; -1 of one that only keeps up the load.
    """

    asked: Request
    record: RequestRecord
    length: int
    log_odds: float
    coins: random.Random
    sent_s: float
    place: int = -1

    @property
    def is_extra(self) -> bool:
        """Whether it only keeps up the load."""
        return self.place < 0

    def tokens(self, number: int) -> list[int]:
        """The next tokens of the answer: those of its prompt again and again, the same in both arms."""
        prompt = self.asked.prompt
        first = self.record.index + self.record.num_tokens
        return [prompt[(first + step) % len(prompt)] for step in range(number)]


@dataclass
class _Clock:
    """Seconds that have passed on an engine, of all arms."""

    now_s: float = 0.0
    noise: random.Random = field(default_factory=random.Random)
    num_iterations: int = 0


def _engine(opening: Opening) -> Engine:
    # The protocol is imported where it is needed: settings and help are known without it.
    from harness.engines.arrivals import Arrival, Origin, Watch
    from harness.engines.protocol import Answered, Arm, Blocks, Engine, Traits
    from harness.engines.rates import arrival_times, has_built_up
    from harness.engines.requests import Load

    asked = opening.settings.engine
    assert isinstance(asked, SimulatedSettings)
    settings: SimulatedSettings = asked
    # Runs with the same seed and the same texts are other runs.
    run = opening.settings
    repeat = run.repeat if isinstance(run, RepeatedSettings) else 1
    clock = _Clock(noise=random.Random(f"noise {opening.settings.seed} {repeat}"))

    class SimulatedArm(Arm):
        """Attributes: factor: of all times, since its last start."""

        def __init__(self, name: str) -> None:
            self.name = name
            self.traits = Traits()
            self.factor = 1.0

        def start(self) -> None:
            self.factor = math.exp(clock.noise.gauss(0, settings.start_noise))

        def answer(
            self,
            requests: Sequence[Request],
            in_flight: int,
            extra: Sequence[Request] = (),
            watch: Watch | None = None,
        ) -> Answered:
            num_draft_tokens = 0
            first = requests[0]
            if self.name == "speculative" and isinstance(first.decoding.num_draft_tokens, int):
                num_draft_tokens = first.decoding.num_draft_tokens
            rate = settings.rate
            arrivals: list[Arrival] = []
            waiting: deque[_Row] = deque()
            running: list[_Row] = []
            ended: list[_Row] = []
            # Since when each slot has been free; none at a rate.
            free: deque[float] = deque()
            # When requests that only keep up the load come, at a rate.
            gaps = random.Random(f"extra {first.seed} {first.index}")
            next_extra_s = clock.now_s if rate is not None and extra else math.inf
            num_extra = num_own = num_of_all = 0

            def passes(ms: float) -> None:
                drift = 1 + settings.drift * clock.now_s / 60
                noise = math.exp(clock.noise.gauss(0, settings.noise))
                clock.now_s += ms / 1000 * self.factor * drift * noise

            def extra_row(sent_s: float) -> _Row:
                nonlocal num_extra
                num_extra += 1
                return _row(settings, extra[(num_extra - 1) % len(extra)], sent_s)

            def give(row: _Row, num_tokens: int) -> None:
                """The next tokens of a request, after which it goes on or ends."""
                nonlocal num_own, num_of_all
                tokens = row.tokens(num_tokens)
                seconds = clock.now_s - row.sent_s
                row.record.add(tokens, seconds)
                if not row.is_extra:
                    origins = [Origin.TARGET] * num_tokens
                    arrivals.append(Arrival(row.place, seconds, tokens, origins))
                num_own += not row.is_extra
                num_of_all += 1
                if row.record.num_tokens < row.length:
                    running.append(row)
                    return
                ended.append(row)
                if rate is None:
                    free.append(clock.now_s + settings.gap_ms / 1000)

            def read_prompts() -> None:
                """Read the prompts that have come, as far as there is room."""
                nonlocal next_extra_s
                together: list[_Row] = []
                while rate is not None or (free and free[0] <= clock.now_s):
                    while next_extra_s <= clock.now_s:
                        assert rate is not None
                        waiting.append(extra_row(next_extra_s))
                        next_extra_s += gaps.expovariate(rate)
                    if waiting and waiting[0].sent_s <= clock.now_s:
                        row = waiting.popleft()
                    elif extra and not waiting and rate is None:
                        row = extra_row(clock.now_s)
                    else:
                        break
                    if rate is None:
                        # Sent when there was room, and read behind others for which there was.
                        row.sent_s = free.popleft()
                    passes(settings.first_ms + settings.prompt_ms * row.record.num_prompt_tokens)
                    if settings.reads_together:
                        together.append(row)
                        continue
                    give(row, 1)
                    # However many come that do not count: others go on.
                    if row.is_extra:
                        break
                for row in together:
                    give(row, 1)

            def iterate() -> None:
                # The last token of an answer is never drafted.
                proposals = [
                    min(num_draft_tokens, row.length - row.record.num_tokens - 1) for row in running
                ]
                passes(settings.iteration_ms(max(proposals), len(running)))
                clock.num_iterations += 1
                if settings.stall_every and clock.num_iterations % settings.stall_every == 0:
                    clock.now_s += settings.stall_ms / 1000
                rows = running.copy()
                running.clear()
                for row, num_proposed in zip(rows, proposals, strict=True):
                    num_accepted = _num_accepted(settings, row, num_proposed)
                    if self.name == "speculative":
                        row.record.outcomes.append((num_proposed, num_accepted))
                    give(row, num_accepted + 1)

            if next_extra_s < math.inf:
                # As with a server, the load has built up before the first request that counts.
                most_in_flight = 0
                while not has_built_up(len(ended), most_in_flight):
                    read_prompts()
                    most_in_flight = max(most_in_flight, len(running) + len(waiting))
                    if running:
                        iterate()
                    elif not waiting:
                        clock.now_s = max(clock.now_s, next_extra_s)
            began_s = clock.now_s
            times = [0.0] * len(requests)
            if rate is not None:
                times = arrival_times(requests, rate)
            else:
                free.extend([began_s] * in_flight)
            if next_extra_s < math.inf:
                # Nor does it drain behind the last.
                next_extra_s = began_s + times[-1] + gaps.expovariate(rate or 1.0)
            own = [
                _row(settings, request, began_s + times[place], place)
                for place, request in enumerate(requests)
            ]
            waiting.extend(own)
            num_own = num_of_all = 0
            while any(row.record.num_tokens < row.length for row in own):
                read_prompts()
                if running:
                    iterate()
                elif free:
                    clock.now_s = max(clock.now_s, free[0])
                elif waiting:
                    clock.now_s = max(clock.now_s, waiting[0].sent_s)
            of_load = [*ended, *running, *waiting]
            seconds = clock.now_s - began_s
            in_flight_s = sum(
                min(row.sent_s + row.record.seconds, clock.now_s) - max(row.sent_s, began_s)
                for row in ended
                if row.sent_s + row.record.seconds > began_s
            )
            in_flight_s += sum(
                max(0.0, clock.now_s - max(row.sent_s, began_s)) for row in (*running, *waiting)
            )
            load = Load(
                seconds,
                request_seconds=in_flight_s,
                share=num_own / num_of_all,
                extra=[row.record for row in of_load if row.is_extra],
                offered_s=times[-1] if rate is not None else 0.0,
            )
            if watch is not None:
                watch(arrivals)
            records = [row.record for row in own]
            return Answered(requests=records, seconds=seconds * load.share, load=load)

    engine = Engine()
    arms = [SimulatedArm(name) for name in opening.settings.arms]
    engine.arms = arms
    for one in arms:
        one.start()

    def begin(arm: Arm) -> None:
        assert isinstance(arm, SimulatedArm)
        arm.start()

    if settings.blocks:
        engine.blocks = Blocks(settings.blocks, begin)
    engine.runner = NAME
    return engine


def _row(settings: SimulatedSettings, request: Request, sent_s: float, place: int = -1) -> _Row:
    """A request in flight. What it yields follows from its prompt, in any order and any company."""
    decoding = request.decoding
    length = decoding.max_new_tokens
    if settings.lengths and not decoding.ignore_eos:
        length = min(length, settings.lengths[request.index % len(settings.lengths)])
    of_prompt = random.Random(f"{request.seed} prompt {request.index}")
    return _Row(
        request,
        request.record(),
        length,
        log_odds=of_prompt.gauss(0, settings.prompts_differ),
        coins=of_prompt,
        sent_s=sent_s,
        place=place,
    )


def _num_accepted(settings: SimulatedSettings, row: _Row, num_proposed: int) -> int:
    """How many of the draft tokens of an iteration are accepted."""
    for place in range(num_proposed):
        rate = settings.rates[min(place, len(settings.rates) - 1)]
        if 0 < rate < 1:
            odds = rate / (1 - rate) * math.exp(row.log_odds)
            rate = odds / (1 + odds)
        if row.coins.random() >= rate:
            return place
    return num_proposed


RECORD = Simulated()
