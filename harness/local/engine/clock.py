"""Times a loop in this process: nothing but decoding happens between two readings of the clock.

The devices are synchronised before the first reading. At the second they have decided the last token.
Iterations are only collected while the clock runs, and read afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from harness.engines.arrivals import Arrival
from harness.engines.phases import Phases
from harness.engines.protocol import Answered, BatchTimes, Request, Weights
from harness.local.decoding.loop import Iteration, RowStep
from harness.results.acceptance import outcome_until_end


class LoopClock:
    """The clock of one answer: it runs within one block (`running`).

    Args:
        requests: the rows of the loop, in the order in which they join.
        weights: the models that decode.
    """

    def __init__(self, requests: Sequence[Request], weights: Weights) -> None:
        self._requests = requests
        self._weights = weights
        # Each iteration behind the seconds at which it was decided; and those of the last one.
        self._noted: list[tuple[float, Iteration]] = []
        self._last_s = 0.0
        # When each row joined: as soon as the iteration before its first one was decided.
        self._joined: dict[int, float] = {}
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

    def note(self, iteration: Iteration) -> None:
        """Note what has just been decided.

        Its tokens are numbers on the host, which has waited for the device to decide them, and for
        nothing that is queued after it.
        """
        for row_step in iteration.row_steps:
            self._joined.setdefault(row_step.row, self._last_s)
        self._last_s = time.perf_counter() - self._started
        self._noted.append((self._last_s, iteration))

    def answered(self, phases: Phases, *, as_batch: bool, drafts: bool) -> Answered:
        """The answers, once the block has ended.

        Args:
            as_batch: whether all rows began with the first iteration, and share their time.
            drafts: whether the arm drafts: an iteration that proposed nothing then has an outcome too, (0, 0).
        """
        records = [request.record() for request in self._requests]
        arrivals = []
        for seconds, row_step in self._timed_steps():
            record = records[row_step.row]
            record.add(row_step.tokens, seconds)
            if row_step.proposed or (drafts and len(record.arrivals) > 1):
                num_proposed = len(row_step.proposed)
                outcome = outcome_until_end(
                    num_proposed, row_step.num_accepted, len(row_step.tokens)
                )
                record.outcomes.append(outcome)
            # A text that ended with an accepted token never came to the rejection behind it.
            was_rejected = len(row_step.tokens) > row_step.num_accepted
            arrival = Arrival(
                row_step.row,
                seconds,
                row_step.tokens,
                row_step.origins,
                row_step.proposed,
                row_step.rejection if was_rejected else None,
            )
            arrivals.append(arrival)
        batch = None
        if as_batch:
            first_s, first = self._noted[0]
            num_first = sum(len(row_step.tokens) for row_step in first.row_steps)
            batch = BatchTimes(first_s, num_first, len(self._noted) - 1)
        return Answered(
            requests=records, seconds=self._seconds, arrivals=arrivals, batch=batch, phases=phases
        )

    def _timed_steps(self) -> Iterator[tuple[float, RowStep]]:
        """Yield what each row gained from each iteration, with the seconds since it joined."""
        for seconds, iteration in self._noted:
            for row_step in iteration.row_steps:
                yield seconds - self._joined[row_step.row], row_step
