"""Timing a generation: nothing but decoding between two readings of the clock, devices synchronised at both."""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from harness.decoding.protocols import Iteration
from harness.engines.protocol import Arm, Engine, Question
from harness.results.acceptance import Acceptance

# Seconds between two frames. A frame also stays for a multiple of its cost, so that a long text or a slow terminal
# takes no more than a tenth of the wait.
FRAME_S = 0.1
_COST_FACTOR = 9.0


@dataclass(frozen=True)
class Generation:
    """One batch through one arm.

    Attributes:
        tokens: of each row.
        outcomes: (num_proposed, num_accepted) of each row's iterations.
        seconds: from the prompts to the last token of the last row.
        seconds_to_first_token: from the prompts to the first token of every row.
        num_iterations: turns of the loop after the first token.
        peak_memory_bytes: the most that GPUs held meanwhile, where somebody looked.
    """

    tokens: list[list[int]]
    outcomes: list[list[tuple[int, int]]]
    seconds: float
    seconds_to_first_token: float
    num_iterations: int
    peak_memory_bytes: int | None = None

    @property
    def acceptance(self) -> Acceptance:
        return Acceptance.of(outcome for row in self.outcomes for outcome in row)

    @property
    def ms_per_token(self) -> float:
        """The time over the mean number of tokens in a row, which is what the reader of one row waits."""
        return 1000 * self.seconds * len(self.tokens) / sum(map(len, self.tokens))


@dataclass
class Lap:
    """The records of one batch through one arm, while it runs.

    Attributes:
        decided: seconds on the arm's clock at which each record was decided.
        seconds: what the clock shows.
    """

    arm: str
    iterations: list[Iteration] = field(default_factory=list)
    decided: list[float] = field(default_factory=list)
    seconds: float = 0.0

    @functools.cached_property
    def generation(self) -> Generation:
        """The sums over all records, once there are all."""
        tokens: list[list[int]] = [[] for _ in self.iterations[0].rows]
        outcomes: list[list[tuple[int, int]]] = [[] for _ in tokens]
        for one in self.iterations:
            for row, new, proposed, accepted in zip(one.rows, one.tokens, one.proposed, one.num_accepted, strict=True):
                tokens[row] += new
                if proposed:
                    outcomes[row].append((len(proposed), accepted))
        return Generation(tokens, outcomes, self.seconds, self.decided[0], len(self.iterations) - 1)


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
def quick_collections() -> Iterator[None]:
    """Exempt what exists now from the collections within the block.

    Looking through everything that the libraries have made takes longer than many a timed region that a collection
    precedes. Undone at the end of the block, so that models of one run do not outlive it.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def run_lap(engine: Engine, arm: Arm, question: Question, draw: Callable[[Lap], None] | None = None) -> Lap:
    """Run `arm` to the end and time it. Records are only collected while the clock runs, and read afterwards.

    The clock is stopped for `draw`, which is called at the first token and whenever a frame is due. Decoding is
    synchronous: none of it goes on meanwhile once the devices have finished what was queued.

    Raises:
        RunError: processes that share the models came to different tokens.
    """
    lap = Lap(arm.name)
    next_frame = 0.0
    with without_garbage_collection():
        records = arm.stream(question)
        engine.synchronize()
        # Moved forward by every stop of the clock.
        started = time.perf_counter()
        for iteration in records:
            # Tokens in a record are numbers on the host, so the device has finished them.
            now = time.perf_counter()
            lap.seconds = now - started
            lap.iterations.append(iteration)
            lap.decided.append(lap.seconds)
            if draw is not None and now >= next_frame:
                engine.synchronize()
                stopped = time.perf_counter()
                draw(lap)
                cost = time.perf_counter() - stopped
                started += cost
                next_frame = stopped + cost + max(FRAME_S, _COST_FACTOR * cost)
        engine.synchronize()
        lap.seconds = time.perf_counter() - started
    engine.check(lap.generation.tokens)
    return lap


def generate(engine: Engine, arm: Arm, question: Question) -> Generation:
    """The sums over a lap; see `run_lap`."""
    return run_lap(engine, arm, question).generation
