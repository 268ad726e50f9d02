"""Times the answers that models in this process give. A `LoopClock` times the answers to a question, and a `PhaseTimer`
divides this time into phases.

The devices are synchronised before the clock starts. It stops once they have decided the last token. Nothing but
decoding is timed: while the clock runs, the results of iterations are only collected, and they are evaluated later.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from harness.engines.arrivals import Arrival
from harness.engines.protocol import Answered, BatchTimes, Phases, Request, Weights
from harness.local.decoding.loop import RowStep


class LoopClock:
    """The clock for the answers to one question. It runs while a block of `running` is executed.

    Args:
        requests: the question's requests, in the order in which they are decoded: batch after batch.
        weights: the models that decode, for synchronisation.
    """

    def __init__(self, requests: Sequence[Request], weights: Weights) -> None:
        self._requests = requests
        self._weights = weights
        # For each iteration: the time at which it was decided, in seconds since the clock started; the index of the
        # first request of its batch; and its row steps.
        self._noted: list[tuple[float, int, list[RowStep]]] = []
        # The time at which each batch began, by the index of its first request. A batch begins when the previous batch
        # has ended.
        self._began: dict[int, float] = {}
        self._seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let the clock run while the block is executed."""
        self._weights.synchronize()
        self._started = time.perf_counter()
        yield
        self._seconds = time.perf_counter() - self._started
        # A drafter may have queued work after the last verdict. It must not slow the next question that is timed.
        self._weights.synchronize()

    def note(self, row_steps: list[RowStep], first_request: int = 0) -> None:
        """Record the result of an iteration that has just been decided, with the present time.

        The tokens in `row_steps` are numbers on the host. So the host has already waited until the device decided them,
        but it has not waited for work that was queued later.

        Args:
            first_request: the index of the first request of the iteration's batch.
        """
        # A batch begins at the time of the last note, which is that of the previous batch's end.
        self._began.setdefault(first_request, self._noted[-1][0] if self._noted else 0.0)
        self._noted.append((time.perf_counter() - self._started, first_request, row_steps))

    def answered(self, phases: Phases, *, as_batch: bool, drafts: bool) -> Answered:
        """Return the answers, after the block of `running` has ended.

        Args:
            as_batch: whether all requests were decoded together as one batch. Then the answers contain the times of the
                batch as a whole.
            drafts: whether the arm drafts. If so, each iteration after the first token has an outcome (the number of
                draft tokens that were proposed, and of those that were accepted), which is (0, 0) if nothing was
                proposed. The pass that decides the first token has an outcome only if it verifies a proposal too, as
                with engine=huggingface. The regular arm has no outcomes.
        """
        records = [request.record() for request in self._requests]
        arrivals = []
        for decided, first_request, row_steps in self._noted:
            seconds = decided - self._began[first_request]
            for row_step in row_steps:
                number = first_request + row_step.row
                record = records[number]
                is_first_token = not record.arrivals
                record.add(row_step.tokens, seconds)
                if row_step.proposed or (drafts and not is_first_token):
                    record.outcomes.append(row_step.outcome)
                    record.outcomes_in_order &= not is_first_token
                # If the text ended with an accepted token, it does not contain the token that was rejected later.
                was_rejected = len(row_step.tokens) > row_step.num_accepted
                arrival = Arrival(
                    number,
                    seconds,
                    row_step.tokens,
                    row_step.origins,
                    row_step.proposed,
                    row_step.rejection if was_rejected else None,
                )
                arrivals.append(arrival)
        batch = None
        if as_batch:
            # The first note is of the pass that decided the first tokens; all others are of iterations.
            first_s, _, _ = self._noted[0]
            batch = BatchTimes(first_s, num_iterations=len(self._noted) - 1)
        return Answered(
            requests=records, seconds=self._seconds, arrivals=arrivals, batch=batch, phases=phases
        )


class PhaseTimer:
    """Times the phases of iterations on the device that runs the calls. On a GPU it records events, which need no
    synchronisation.

    Args:
        device: the target's device. If the draft is on another device, its time is included, because the target's
            device waits for it.
        is_launched: whether the host launches the kernels of a call one by one. Then the time of a call contains time
            of the host.
    """

    def __init__(self, device: torch.device, *, is_launched: bool = False) -> None:
        self._device = device
        self._is_launched = is_launched
        # Each phase with its beginning: a time in seconds or, on a GPU, an event.
        self._marks: list[tuple[str, Any]] = []

    def __call__(self, phase: str) -> None:
        """Mark the beginning of a phase, which is also the end of the phase before."""
        if self._device.type != "cuda":
            self._marks.append((phase, time.perf_counter()))
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._marks.append((phase, event))

    @property
    def phases(self) -> Phases:
        """The total time and the number of calls of each phase. Read this only after the device has finished all calls.

        The phase that was marked last is left out, because it has no end.
        """
        phases = Phases(knows_host=not self._is_launched)
        for (phase, began), (_, ended) in itertools.pairwise(self._marks):
            is_event = self._device.type == "cuda"
            seconds = began.elapsed_time(ended) / 1000 if is_event else ended - began
            phases.seconds[phase] += seconds
            phases.calls[phase] += 1
        return phases
