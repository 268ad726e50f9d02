"""Continuous batching: one thread owns the models; answers join and leave between iterations.

An arm's loop numbers rows in the order in which they join.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from harness.config.errors import in_one_line
from harness.config.failures import as_run_error
from harness.engines.door.serving import ENDING, Refusal, Result, TokenLogprob
from harness.local.decoding.iteration import Iteration
from harness.local.decoding.loop import Loop
from harness.local.decoding.protocols import NonFiniteError
from harness.local.engine.engine import LocalArm
from harness.local.serving.answers import Answer


def reason_of(error: Exception) -> str:
    """Why an answer failed, in one line."""
    return str(as_run_error(error) or in_one_line(error))


class _Batch:
    """The answers that are generated together, all by one arm.

    Attributes:
        arm: None while there are no answers.
        rows: the answers by their numbers in the arm's loop, which counts rows from 0 as they join.
    """

    def __init__(self) -> None:
        self._loop: Loop | None = None
        self.arm: LocalArm | None = None
        self.rows: dict[int, Answer] = {}
        self._num_joined = 0

    def drop_cancelled(self) -> None:
        """Forget the answers that nobody waits for any more."""
        # Once for each answer, because another thread may cancel it at any moment.
        cancelled = [number for number, answer in self.rows.items() if answer.cancelled]
        for number in cancelled:
            del self.rows[number]
        if self._loop is not None:
            self._loop.drop(cancelled)
        if not self.rows:
            self.close()

    def join(self, joining: list[Answer]) -> None:
        """Take answers of one arm into the batch; the next `step` must get them too."""
        if joining:
            self.arm = joining[0].arm
        self.rows |= dict(enumerate(joining, self._num_joined))
        self._num_joined += len(joining)

    def step(self, joining: list[Answer]) -> None:
        """Go on by one iteration of all rows; where answers join, read their prompts instead.

        Args:
            joining: those that `join` has just got; `arm` is known since the first of them.
        """
        arm = self.arm
        assert arm is not None
        try:
            with arm.explained():
                if self._loop is None:
                    self._loop = arm.loop(joining[0].request)
                if joining:
                    requests = [arm.joining([answer.remaining]) for answer in joining]
                    record = self._loop.add(requests)
                else:
                    record = self._loop.step()
            self._deliver(arm, self._loop, record)
        except Exception as error:
            self._fail(error)
        if not self.rows:
            self.close()

    def _fail(self, error: Exception) -> None:
        """Fail the answer whose numbers overflowed, and begin the others again behind the tokens
        that they have; fail all of them for any other error.
        """
        failed = list(self.rows.values())
        going_on: list[Answer] = []
        cause = error.__cause__
        # The row whose numbers overflowed, if that is the error.
        number = cause.row if isinstance(cause, NonFiniteError) else None
        if number in self.rows:
            failed = [self.rows[number]]
            going_on = [answer for answer in self.rows.values() if answer not in failed]
        for answer in failed:
            answer.fail(reason_of(error))
        # The loop has ended with its error.
        self._loop = None
        self.rows = dict(enumerate(going_on))
        self._num_joined = len(going_on)
        if going_on:
            self.step(going_on)

    def close(self) -> None:
        """Begin anew with the next answer."""
        self._loop = None
        self.arm = None
        self._num_joined = 0

    def _deliver(self, arm: LocalArm, loop: Loop, record: Iteration) -> None:
        """Give the tokens of a record to their answers; those that end leave."""
        for place, number in enumerate(record.rows):
            answer = self.rows[number]
            logprobs: list[TokenLogprob] = []
            if number in record.logits:
                logprobs = arm.logprobs(answer.request, record, place)
            tokens = record.tokens[place]
            num_proposed = len(record.proposed[place])
            if answer.take(tokens, num_proposed, record.num_accepted[place], logprobs):
                del self.rows[number]
                loop.drop([number])


class Scheduler:
    """Runs answers in its thread.

    The arms share the runners of one engine, so only one arm decodes at a time. Answers begin in
    the order in which they were asked for: one for the other arm waits until the batch has ended,
    and those behind it wait too.

    Args:
        max_rows: the most answers that are generated together.
        max_waiting: the most answers beyond these that may wait.
    """

    def __init__(self, max_rows: int, max_waiting: int) -> None:
        self._max_rows = max_rows
        self._max_waiting = max_waiting
        self._batch = _Batch()
        self._waiting: list[Answer] = []
        self._alone: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._changed = threading.Condition()
        self._closing = False
        # Set once answers that still run are failed.
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)
        self._thread.start()

    @property
    def num_running(self) -> int:
        return sum(not answer.has_ended for answer in list(self._batch.rows.values()))

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def is_running(self) -> bool:
        return self._thread.is_alive() and not self._stopped.is_set()

    def submit(self, answers: list[Answer]) -> None:
        """Have answers generated, all of them or none.

        Raises:
            Refusal: too many wait already, or the service is ending.
        """
        with self._changed:
            self._check(len(answers))
            self._waiting += answers
            self._changed.notify()

    def run_alone(self, work: Callable[[], Result]) -> Future[Result]:
        """Call `work` in the scheduler's thread when no answer is generated.

        Raises:
            Refusal: as `submit` does.
        """
        future: Future[Result] = Future()
        with self._changed:
            self._check(1)
            self._alone.append((work, future))
            self._changed.notify()
        return future

    def close(self, grace_s: float = 0.0) -> None:
        """Fail what waits now, and what still runs after `grace_s`; then end the thread."""
        with self._changed:
            self._closing = True
            waiting = self._waiting
            self._waiting = []
            alone = self._alone
            self._alone = deque()
            self._changed.notify()
        for answer in waiting:
            answer.fail(ENDING)
        for _, future in alone:
            if future.set_running_or_notify_cancel():
                future.set_exception(Refusal(503, ENDING))
        self._thread.join(grace_s)
        self._stopped.set()
        # Not in the scheduler's thread, whose iteration may take long.
        for answer in list(self._batch.rows.values()):
            answer.fail(ENDING)
        self._thread.join()

    def _check(self, num_more: int) -> None:
        if self._closing or not self.is_running():
            raise Refusal(503, ENDING)
        num_waiting = len(self._waiting) + len(self._alone)
        num_asked = self.num_running + num_waiting + num_more
        if num_asked > self._max_rows + self._max_waiting:
            rule = f"at most {self._max_waiting} may wait (max_waiting)"
            raise Refusal(429, f"too many requests at once; {rule}")

    def _run(self) -> None:
        while not self._stopped.is_set():
            with self._changed:
                while not (self._closing or self._waiting or self._alone or self.num_running):
                    self._changed.wait()
                if self._closing and not self.num_running:
                    return
            self._turn()

    def _turn(self) -> None:
        """One iteration of the batch, or the next work that must be alone."""
        self._batch.drop_cancelled()
        if not self.num_running:
            with self._changed:
                next_alone = self._alone.popleft() if self._alone else None
            if next_alone is not None and next_alone[1].set_running_or_notify_cancel():
                work, future = next_alone
                try:
                    future.set_result(work())
                except Exception as error:
                    future.set_exception(error)
        self._read_prompt()
        with self._changed:
            # Answers join as soon as they no longer wait: `close` finds each in one of both.
            self._waiting = [answer for answer in self._waiting if not answer.cancelled]
            # Work that must be alone waits for answers that run, and not for those that wait.
            room = 0 if self._alone else self._max_rows - self.num_running
            joining: list[Answer] = []
            for answer in self._waiting[:room]:
                arm = self._batch.arm or self._waiting[0].arm
                if answer.arm is not arm or answer.awaits_prompt:
                    break
                joining.append(answer)
            self._waiting = self._waiting[len(joining) :]
            self._batch.join(joining)
        if self.num_running:
            self._batch.step(joining)

    def _read_prompt(self) -> None:
        """Score the prompt of the first answer that waits for it.

        One between two iterations: the answers that run wait no longer than for a prompt that
        joins.
        """
        with self._changed:
            awaiting = [one for one in self._waiting if one.awaits_prompt and not one.cancelled]
        if not awaiting:
            return
        answer = awaiting[0]
        assert answer.num_prompt_logprobs is not None
        try:
            answer.prompt_logprobs = answer.arm.prompt_logprobs(
                answer.request.prompt, answer.num_prompt_logprobs
            )
        except Exception as error:
            answer.fail(reason_of(error))
            with self._changed:
                self._waiting = [one for one in self._waiting if one is not answer]
