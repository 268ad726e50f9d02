"""Takes the times of answers in this process. A `LoopClock` times an answer, and a `PhaseTimer` divides this time into
phases.

The devices are synchronised before the clock starts. When it stops, they have decided the last token. In between there
is only decoding: iterations are collected while the clock runs, and evaluated afterwards.
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
    """The clock of one question's answers, which runs within a block of `running`.

    Args:
        requests: the question's requests, in the order of the batches in which they are decoded.
        weights: the models that decode.
    """

    def __init__(self, requests: Sequence[Request], weights: Weights) -> None:
        self._requests = requests
        self._weights = weights
        # For each iteration: the seconds when it was decided, the index of its batch's first request, and its row
        # steps.
        self._noted: list[tuple[float, int, list[RowStep]]] = []
        # The seconds when each batch began, by the index of its first request. A batch begins when the last one ended.
        self._began: dict[int, float] = {}
        self._seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let the clock run within this block."""
        self._weights.synchronize()
        self._started = time.perf_counter()
        yield
        self._seconds = time.perf_counter() - self._started
        # Work that a drafter has queued after the last verdict must not slow the next timed question.
        self._weights.synchronize()

    def note(self, row_steps: list[RowStep], first: int = 0) -> None:
        """Note the result of an iteration that has just been decided.

        Its tokens are numbers on the host. So the host has waited until the device had decided them, but not for any
        work that was queued later.

        Args:
            first: the index of the batch's first request.
        """
        self._began.setdefault(first, self._noted[-1][0] if self._noted else 0.0)
        self._noted.append((time.perf_counter() - self._started, first, row_steps))

    def answered(self, phases: Phases, *, as_batch: bool, drafts: bool) -> Answered:
        """Return the answers. Called after the block of `running`.

        Args:
            as_batch: whether all requests were one batch, whose rows share their time.
            drafts: whether the arm drafts. An iteration that proposed nothing then has the outcome (0, 0), not none.
        """
        records = [request.record() for request in self._requests]
        arrivals = []
        for decided, first, row_steps in self._noted:
            seconds = decided - self._began[first]
            for row_step in row_steps:
                number = first + row_step.row
                record = records[number]
                record.add(row_step.tokens, seconds)
                if row_step.proposed or (drafts and len(record.arrivals) > 1):
                    record.outcomes.append(row_step.outcome)
                # If the text ended with an accepted token, a later rejection does not belong to it.
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
            first_s, _, _ = self._noted[0]
            batch = BatchTimes(first_s, len(self._noted) - 1)
        return Answered(
            requests=records, seconds=self._seconds, arrivals=arrivals, batch=batch, phases=phases
        )


class PhaseTimer:
    """Times the phases of iterations by the clock of the device that runs the calls. On a GPU it uses events, which
    need no synchronisation.

    Args:
        device: the target's device. A draft on another device is included, because this device waits for it.
        is_launched: whether the host launches the kernels of a call one by one, so that its time is part of the call's.
    """

    def __init__(self, device: torch.device, *, is_launched: bool = False) -> None:
        self._device = device
        self._is_launched = is_launched
        # Each phase, with the time or the event of its beginning.
        self._marks: list[tuple[str, Any]] = []

    def __call__(self, phase: str) -> None:
        """Mark the beginning of a phase."""
        if self._device.type != "cuda":
            self._marks.append((phase, time.perf_counter()))
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._marks.append((phase, event))

    @property
    def phases(self) -> Phases:
        """The times of the phases. Read it only when the device has finished all calls."""
        phases = Phases(knows_host=not self._is_launched)
        for (phase, began), (_, ended) in itertools.pairwise(self._marks):
            is_event = self._device.type == "cuda"
            seconds = began.elapsed_time(ended) / 1000 if is_event else ended - began
            phases.seconds[phase] += seconds
            phases.calls[phase] += 1
        return phases
