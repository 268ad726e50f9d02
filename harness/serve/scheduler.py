"""Continuous batching: one thread that owns the models; answers join and leave between two iterations."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from starlette.exceptions import HTTPException

from harness.config.errors import in_one_line
from harness.decoding.batch import Change, Records
from harness.decoding.protocols import Iteration
from harness.engines.local import LocalArm
from harness.models.failures import as_run_error
from harness.serve.answers import Answer

_ENDING = "the service is ending"


class _Batch:
    """The answers of one arm that are generated together. `open_arm` is called when it is first needed."""

    def __init__(self, open_arm: Callable[[], LocalArm]) -> None:
        self._open_arm = open_arm
        self._arm: LocalArm | None = None
        self._records: Records | None = None
        self.rows: dict[int, Answer] = {}  # by their numbers in the loop
        self._left: list[int] = []  # numbers that have ended, which the loop need not know yet
        self._num_joined = 0

    def drop_cancelled(self) -> None:
        """Forget the answers that nobody waits for any more."""
        self._left += [number for number, answer in self.rows.items() if answer.cancelled]
        self.rows = {number: answer for number, answer in self.rows.items() if not answer.cancelled}
        if not self.rows:
            self.close()

    def step(self, joining: list[Answer]) -> None:
        """Go on by one iteration; where answers join, read their prompts instead."""
        self.rows |= dict(enumerate(joining, self._num_joined))
        self._num_joined += len(joining)
        try:
            self._arm = self._arm or self._open_arm()
            if self._records is None and joining:
                self._records = self._arm.stream(joining[0].question)
                self._deliver(next(self._records))
                joining = joining[1:]
            if self._records is not None and (joining or self.rows):
                requests = [self._arm.request(answer.question) for answer in joining]
                self._deliver(self._records.send(Change(self._left, requests)))
        except Exception as error:
            for answer in self.rows.values():
                answer.fail(str(as_run_error(error) or in_one_line(error)))
            self.rows = {}
        if not self.rows:
            self.close()

    def close(self) -> None:
        """Give back the caches."""
        if self._records is not None:
            self._records.close()
        self._records, self._left, self._num_joined = None, [], 0

    def _deliver(self, record: Iteration) -> None:
        self._left = []
        for number, tokens, proposed, accepted in zip(
            record.rows, record.tokens, record.proposed, record.num_accepted, strict=True
        ):
            if self.rows[number].take(tokens, len(proposed), accepted):
                del self.rows[number]
                self._left.append(number)


class Scheduler:
    """Runs answers of all arms in its thread, `max_rows` at once; `max_waiting` more may wait.

    `open_arm` gives one of the `arms` by its name, in that thread, when it is first needed. Two share no runner.
    """

    def __init__(
        self,
        open_arm: Callable[[str], LocalArm],
        arms: Sequence[str],
        max_rows: int,
        max_waiting: int,
    ) -> None:
        self._max_rows, self._max_waiting = max_rows, max_waiting
        self._batches = {name: _Batch(partial(open_arm, name)) for name in arms}
        self._waiting: list[Answer] = []
        self._alone: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self.thread = threading.Thread(target=self._run, name="scheduler", daemon=True)
        self.thread.start()

    @property
    def num_running(self) -> int:
        return sum(len(batch.rows) for batch in self._batches.values())

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def submit(self, answers: list[Answer]) -> None:
        """Have answers generated, all of them or none. Raises HTTPException if too many wait, or at the end."""
        with self._changed:
            self._check(len(answers))
            self._waiting += answers
            self._changed.notify()

    def alone(self, work: Callable[[], Any]) -> Future[Any]:
        """Call `work` in the scheduler's thread when nothing else is generated; raises as `submit` does."""
        future: Future[Any] = Future()
        with self._changed:
            self._check(1)
            self._alone.append((work, future))
            self._changed.notify()
        return future

    def close(self) -> None:
        """Fail what waits and runs, and end the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self.thread.join()

    def _check(self, num_more: int) -> None:
        if self._closing or not self.thread.is_alive():
            raise HTTPException(503, _ENDING)
        if len(self._waiting) + len(self._alone) + num_more > self._max_rows + self._max_waiting:
            raise HTTPException(429, f"{len(self._waiting)} requests are waiting already")

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._closing or self._waiting or self._alone or self.num_running):
                    self._changed.wait()
                if self._closing:
                    break
            self._turn()
        for answer in [
            *self._waiting,
            *(row for batch in self._batches.values() for row in batch.rows.values()),
        ]:
            answer.fail(_ENDING)
        for _, future in self._alone:
            future.set_exception(HTTPException(503, _ENDING))

    def _turn(self) -> None:
        """One iteration of every arm."""
        for batch in self._batches.values():
            batch.drop_cancelled()
        if self._alone and not self.num_running:
            self._work_alone(*self._alone.popleft())
        with self._changed:
            # What must be alone waits for those that run, and not for those that wait.
            room = 0 if self._alone else self._max_rows - self.num_running
            waiting = [answer for answer in self._waiting if not answer.cancelled]
            joining, self._waiting = waiting[:room], waiting[room:]
        for name, batch in self._batches.items():
            own = [answer for answer in joining if answer.arm == name]
            if batch.rows or own:
                batch.step(own)

    def _work_alone(self, work: Callable[[], Any], future: Future[Any]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(HTTPException(500, str(as_run_error(error) or in_one_line(error))))
