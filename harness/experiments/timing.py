"""Timing a generation: nothing but decoding between two readings of the clock, devices synchronised at both."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from harness.decoding.loops import Request
from harness.decoding.protocols import Drafter, Iteration, Proposal, Runner
from harness.experiments.arms import Arm, Players
from harness.models.devices import synchronize
from harness.models.tensor_parallel import check_agreement
from harness.results.acceptance import Acceptance

Result = TypeVar("Result")


@dataclass(frozen=True)
class Generation:
    """One batch through one arm.

    Attributes:
        tokens: of each row.
        outcomes: (num_proposed, num_accepted) of each row's iterations.
        seconds: from the prompts to the last token of the last row.
        seconds_to_first_token: from the prompts to the first token of every row.
        num_iterations: turns of the loop after the first token.
    """

    tokens: list[list[int]]
    outcomes: list[list[tuple[int, int]]]
    seconds: float
    seconds_to_first_token: float
    num_iterations: int

    @classmethod
    def of(cls, iterations: Sequence[Iteration], seconds: float, seconds_to_first_token: float) -> Generation:
        """From the records of one batch, all of them, and their times."""
        num_rows = len(iterations[0].rows)
        tokens: list[list[int]] = [[] for _ in range(num_rows)]
        outcomes: list[list[tuple[int, int]]] = [[] for _ in range(num_rows)]
        for iteration in iterations:
            for row, new, proposed, accepted in zip(
                iteration.rows, iteration.tokens, iteration.proposed, iteration.num_accepted, strict=True
            ):
                tokens[row] += new
                if proposed:
                    outcomes[row].append((len(proposed), accepted))
        return cls(tokens, outcomes, seconds, seconds_to_first_token, len(iterations) - 1)

    @property
    def acceptance(self) -> Acceptance:
        return Acceptance.of(outcome for row in self.outcomes for outcome in row)


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
    """Spare what exists now from the collections within the block.

    Looking through everything that the libraries have made takes longer than many a timed region that a collection
    precedes. Undone at the end of the block, so that models of one run do not outlive it.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def generate(arm: Arm, request: Request, devices: Sequence[torch.device]) -> Generation:
    """Run `arm` to the end and time it. Records are only collected while the clock runs and read afterwards.

    Raises:
        RunError: ranks that share the models came to different tokens.
    """
    iterations: list[Iteration] = []
    with without_garbage_collection():
        synchronize(devices)
        started = time.perf_counter()
        records = arm.decode(request)
        iterations.append(next(records))
        # Tokens in a record are numbers on the host, so the device has finished them.
        first_token = time.perf_counter()
        iterations.extend(records)
        synchronize(devices)
        ended = time.perf_counter()
    generation = Generation.of(iterations, ended - started, first_token - started)
    check_agreement(generation.tokens)
    return generation


@dataclass
class Stopwatch:
    """Seconds and calls spent in one phase, devices synchronised around each call."""

    devices: Sequence[torch.device]
    seconds: float = 0.0
    calls: int = 0

    def __call__(self, call: Callable[[], Result]) -> Result:
        synchronize(self.devices)
        started = time.perf_counter()
        result = call()
        synchronize(self.devices)
        self.seconds += time.perf_counter() - started
        self.calls += 1
        return result

    @property
    def mean_ms(self) -> float | None:
        return 1000 * self.seconds / self.calls if self.calls else None


@dataclass
class Phases:
    """Where the time of a generation goes, from a pass of its own: the stopwatches synchronise, the timed run does not.

    Attributes:
        forward: the target's forward passes after the prompt.
        drafting: proposals, the draft model's roll-back included, one call an iteration and phase.
    """

    devices: Sequence[torch.device]
    forward: Stopwatch = field(init=False)
    drafting: Stopwatch = field(init=False)

    def __post_init__(self) -> None:
        self.forward = Stopwatch(self.devices)
        self.drafting = Stopwatch(self.devices)

    def watch(self, watched: Players) -> Players:
        """The same players under the stopwatches."""
        drafter = None if watched.drafter is None else _WatchedDrafter(watched.drafter, self.drafting)
        return Players(_WatchedRunner(watched.target, self.forward), drafter)


@dataclass
class _WatchedRunner:
    runner: Runner
    watch: Stopwatch

    def start(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        return self.runner.start(prompts)

    def extend(self, tokens: Tensor) -> Tensor:
        return self.watch(lambda: self.runner.extend(tokens))

    def keep(self, counts: Sequence[int]) -> None:
        self.runner.keep(counts)

    def select(self, rows: Sequence[int]) -> None:
        self.runner.select(rows)


@dataclass
class _WatchedDrafter:
    drafter: Drafter
    watch: Stopwatch

    def start(self, prompts: Sequence[Sequence[int]], first_tokens: Sequence[int]) -> None:
        self.drafter.start(prompts, first_tokens)

    def propose(self, num_draft_tokens: int, uniforms: Tensor) -> Proposal:
        return self.watch(lambda: self.drafter.propose(num_draft_tokens, uniforms))

    def observe(self, num_accepted: Sequence[int], next_tokens: Sequence[int]) -> None:
        self.drafter.observe(num_accepted, next_tokens)

    def select(self, rows: Sequence[int]) -> None:
        self.drafter.select(rows)
