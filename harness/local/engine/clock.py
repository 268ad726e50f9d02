"""Times in this process. Nothing but decoding happens between two readings of the clock of an answer (`LoopClock`); a
`PhaseTimer` divides its time by calls.

The devices are synchronised before the first reading. At the second they have decided the last token.
Iterations are only collected while the clock runs, and read afterwards.
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
    """The clock of one answer: it runs within one block (`running`).

    Args:
        requests: the rows of the loops, batch after batch.
        weights: the models that decode.
    """

    def __init__(self, requests: Sequence[Request], weights: Weights) -> None:
        self._requests = requests
        self._weights = weights
        # Each iteration, behind the seconds at which it was decided, and the first request of its batch.
        self._noted: list[tuple[float, int, list[RowStep]]] = []
        # When the batch with each first request began: as soon as the last one was decided.
        self._began: dict[int, float] = {}
        self._seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the clock within this block."""
        self._weights.synchronize()
        self._started = time.perf_counter()
        yield
        self._seconds = time.perf_counter() - self._started
        # What a drafter has queued behind the last verdict must not slow what is timed next.
        self._weights.synchronize()

    def note(self, row_steps: list[RowStep], first: int = 0) -> None:
        """Note what an iteration has just decided of a batch that begins with the request `first`.

        Its tokens are numbers on the host, which has waited for the device to decide them, and for
        nothing that is queued after it.
        """
        self._began.setdefault(first, self._noted[-1][0] if self._noted else 0.0)
        self._noted.append((time.perf_counter() - self._started, first, row_steps))

    def answered(self, phases: Phases, *, as_batch: bool, drafts: bool) -> Answered:
        """The answers, once the block has ended.

        Args:
            as_batch: whether all rows began with the first iteration, and share their time.
            drafts: whether the arm drafts: an iteration that proposed nothing then has an outcome too, (0, 0).
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
                # A text that ended with an accepted token never came to the rejection behind it.
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
    """Times the phases of iterations by the clock of the device that makes their calls; on a GPU by events, for which
    nothing waits.

    Args:
        device: the target's, for which a draft on another one waits.
        is_launched: whether the host launches the kernels of a call one by one: its time is then a part of the call's.
    """

    def __init__(self, device: torch.device, *, is_launched: bool = False) -> None:
        self._device = device
        self._is_launched = is_launched
        # Each phase, with the time, or the event, at which it began.
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
        """The times, once the device has made all calls."""
        phases = Phases(knows_host=not self._is_launched)
        for (phase, began), (_, ended) in itertools.pairwise(self._marks):
            is_event = self._device.type == "cuda"
            seconds = began.elapsed_time(ended) / 1000 if is_event else ended - began
            phases.seconds[phase] += seconds
            phases.calls[phase] += 1
        return phases
