"""Times one question through one arm: nothing but decoding between two readings of the clock.

The devices are synchronised before the first. At the second they have decided the last token, and
may still be busy with a turn that no answer needs. Everything that a run says about speed comes
from a `Generation`.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from harness.config.errors import RunError
from harness.engines.energy import GpuMeter, GpuUse
from harness.engines.iteration import Iteration
from harness.engines.protocol import Answered, Arm, Engine, Question
from harness.engines.requests import RequestRecord
from harness.results.acceptance import Acceptance, outcome_of

# Seconds between two frames. After a frame that was slow to draw the next one waits for a multiple
# of that time, so that drawing takes no more than a tenth of a user's wait.
FRAME_S = 0.1
_COST_FACTOR = 9.0


class Wait(NamedTuple):
    """How long a reader waited for an answer, and its tokens: of a request, or of a row of mean length in a batch."""

    ms: float
    num_tokens: float


@dataclass
class Generation(Answered):
    """One question through one arm: its records while it runs, and a request per prompt in the end.

    Attributes:
        arm: its name.
        iterations: the records; `generate` drops them, because they may hold tensors.
        decided: seconds on the arm's clock at which each record was decided.
        seconds: on the arm's clock so far; in the end, from the prompts to the last token of the
            last row. Of requests that were sent, the share of that time that they had of the
            server.
        num_first: tokens of all rows in the first record; 0 until `finish`.
        question: that it answers; None where only records are known.
        requests: one per prompt, the arm's own or, behind `finish`, one for each row of the batch.
        sent: whether requests were kept in flight, so that each has its own time. Rows of a batch
            share theirs.
        gpu: energy and lowered clocks of GPUs meanwhile; None without any.
        peak_memory_bytes: the most that GPUs held meanwhile; None where that is not known.
    """

    arm: str
    iterations: list[Iteration] = field(default_factory=list)
    decided: list[float] = field(default_factory=list)
    seconds: float = 0.0
    num_first: int = 0
    question: Question | None = None
    sent: bool = False
    gpu: GpuUse | None = None
    peak_memory_bytes: int | None = None

    @property
    def tokens(self) -> list[list[int]]:
        """The tokens of each row."""
        return [request.token_ids for request in self.requests]

    @property
    def with_prompts(self) -> list[tuple[Sequence[int], RequestRecord]]:
        """The token ids of each prompt, with the request about it."""
        assert self.question is not None
        return list(zip(self.question.prompts, self.requests, strict=True))

    @property
    def acceptance(self) -> Acceptance:
        return Acceptance.of(outcome for request in self.requests for outcome in request.outcomes)

    @property
    def ms_per_token(self) -> float:
        """The time over the mean number of tokens in a row, the wait of a reader of one row; nan without a token."""
        num_tokens = sum(request.num_tokens for request in self.requests)
        return 1000 * self.seconds * len(self.requests) / num_tokens if num_tokens else math.nan

    @property
    def waits(self) -> dict[int, Wait]:
        """By prompt index: of each answered request, if they were sent.

        A batch has one time for all rows, under its first index.
        """
        if not self.sent:
            num_tokens = sum(request.num_tokens for request in self.requests)
            if not num_tokens:
                return {}
            return {
                self.requests[0].index: Wait(1000 * self.seconds, num_tokens / len(self.requests))
            }
        return {
            request.index: Wait(1000 * request.seconds, request.num_tokens)
            for request in self.requests
            if request.answered
        }

    @property
    def decode_waits(self) -> dict[int, Wait]:
        """`waits` without the first record, of a batch; empty for requests that were sent."""
        num_tokens = sum(request.num_tokens for request in self.requests) - self.num_first
        if self.sent or not self.num_first or num_tokens < 1:
            return {}
        ms = 1000 * (self.seconds - self.decided[0])
        return {self.requests[0].index: Wait(ms, num_tokens / len(self.requests))}

    def finish(self, requests: Sequence[RequestRecord] = ()) -> None:
        """Set `requests`, to the arm's own records of them, or to one for each row of the batch, and `sent`."""
        if requests:
            self.requests = requests
            self.sent = True
            return
        first = self.iterations[0]
        self.num_first = sum(map(len, first.tokens))
        self.requests = [RequestRecord(row, 0) for row in first.rows]
        if self.question is not None:
            for request, index, prompt in zip(
                self.requests, self.question.indices, self.question.prompts, strict=True
            ):
                request.index, request.num_prompt_tokens = index, len(prompt)
        for seconds, record in zip(self.decided, self.iterations, strict=True):
            for row, new_tokens, proposed, num_accepted in zip(
                record.rows, record.tokens, record.proposed, record.num_accepted, strict=True
            ):
                self.requests[row].add(new_tokens, seconds)
                if proposed or record.verdict is not None:
                    outcome = outcome_of(len(proposed), num_accepted, len(new_tokens))
                    self.requests[row].outcomes.append(outcome)


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Collect now, and not again until the block is left."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def quick_garbage_collections() -> Iterator[None]:
    """Exempt what exists now from the collections within the block.

    A collection before each timed region would otherwise look through everything that the libraries
    have made, which takes longer than many of these regions. Undone at the end of the block, so
    that models of one run do not outlive it.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def run_lap(
    engine: Engine,
    arm: Arm,
    question: Question,
    draw: Callable[[Generation], None] | None = None,
    *,
    allow_failures: bool = False,
) -> Generation:
    """Run `arm` to the end and time it. Records are only collected while the clock runs, and read
    afterwards.

    Args:
        draw: shows the generation so far to a user, at the first token and whenever a frame is due.
            The clock stops meanwhile, and no decoding goes on once the devices have finished their
            queues.
        allow_failures: of requests; each has its error in its record.

    Raises:
        RunError: a request failed, or the models gave no numbers.
    """
    generation = Generation(arm.name, question=question)
    weights = engine.weights

    def synchronize() -> None:
        if weights is not None:
            weights.synchronize()

    if weights is not None:
        weights.reset_peak_memory()
    with without_garbage_collection():
        records = arm.stream(question)
        meter = GpuMeter(weights.gpus if weights is not None else ())
        next_frame = 0.0
        synchronize()
        # Moved forward by every stop of the clock, so that stops do not count.
        started = time.perf_counter()
        for iteration in records:
            # Tokens in a record are numbers on the host, which has waited for the device's event
            # behind them, and for nothing that is queued after it.
            now = time.perf_counter()
            generation.seconds = now - started
            generation.iterations.append(iteration)
            generation.decided.append(generation.seconds)
            if draw is not None and now >= next_frame:
                synchronize()
                stopped = time.perf_counter()
                draw(generation)
                cost = time.perf_counter() - stopped
                started += cost
                next_frame = stopped + cost + max(FRAME_S, _COST_FACTOR * cost)
        generation.seconds = time.perf_counter() - started
        generation.gpu = meter.stop()
        # A loop that works ahead has queued another turn behind a stop token. It must not slow what
        # is timed next.
        synchronize()
    answered = arm.answered()
    generation.finish(answered.requests)
    generation.load = answered.load
    if generation.load is not None:
        generation.seconds = generation.load.seconds * generation.load.share
    generation.counted = answered.counted
    generation.phases = answered.phases
    if weights is not None:
        generation.peak_memory_bytes = weights.peak_memory_bytes()
    errors = [str(request.error) for request in generation.requests if request.error is not None]
    if errors and not allow_failures:
        count = f"{len(errors)} of {len(generation.requests)}"
        raise RunError(f"{arm.name}: {count} requests failed, the first with {errors[0]}")
    return generation


def generate(
    engine: Engine, arm: Arm, question: Question, *, allow_failures: bool = False
) -> Generation:
    """Run and time one question, and drop its records."""
    generation = run_lap(engine, arm, question, allow_failures=allow_failures)
    generation.iterations = []
    return generation
