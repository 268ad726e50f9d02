"""Continuous batching: one thread owns the models; answers join and leave between iterations.

The service gives an answer its tokens, iteration by iteration. It hands the pieces of text that become certain on to
the request that waits for it, and ends where the text stops.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from harness.config.errors import in_one_line
from harness.config.failures import as_run_error
from harness.engines.detokenizer import Detokenizer
from harness.engines.door.serving import (
    ENDING,
    Piece,
    Refusal,
    Result,
    ScoredToken,
    TokenLogprob,
)
from harness.engines.protocol import Engine, Request
from harness.engines.tokenizer import Tokenizer
from harness.local.decoding.loop import Loop
from harness.local.engine.engine import LocalArm
from harness.results.acceptance import outcome_of


@dataclass(eq=False)
class Answer:
    """The answer to a request.

    Attributes:
        arm: that generates it.
        put: called with each piece, in the service's thread.
        choice: its number among the request's answers, from 0.
        stops: texts that end it; they are not part of it.
        num_prompt_logprobs: how many of the likeliest tokens are asked for at each position of the
            prompt; None for no log-probabilities there.
        prompt_logprobs: one entry per token of the prompt but the first; None until it joins a batch.
        cancelled: whether nobody waits for it any more. The client's side sets it, and its row is then
            dropped.
        token_ids: so far.
        outcomes: (num_proposed, num_accepted) of each iteration that drafted something.
    """

    arm: LocalArm
    request: Request
    tokenizer: Tokenizer
    put: Callable[[Piece], None]
    choice: int = 0
    stops: Sequence[str] = ()
    num_prompt_logprobs: int | None = None
    prompt_logprobs: Sequence[TokenLogprob] | None = None
    cancelled: bool = False
    token_ids: list[int] = field(default_factory=list)
    outcomes: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._detokenizer = Detokenizer(self.tokenizer, self.request.prompt)
        # The end of the text while it may be the beginning of a stop: `the EN` before the stop
        # `END`.
        self._held = ""
        self._num_characters = 0

    def take(
        self,
        tokens: Sequence[int],
        num_proposed: int,
        num_accepted: int,
        logprobs: Sequence[TokenLogprob] = (),
    ) -> Piece:
        """Add the tokens of one iteration -> the text that is certain.

        Args:
            tokens: one or more; the loop has cut them behind a stop token and at `max_new_tokens`.
                All are passed on, even those of a stop text and behind it.
            logprobs: of these tokens, if they are asked for.
        """
        outcome = outcome_of(num_proposed, num_accepted, len(tokens))
        if outcome[0]:
            self.outcomes.append(outcome)
        self.token_ids += tokens
        finish_reason = None
        if tokens[-1] in self.request.stop_tokens:
            finish_reason = "stop"
        elif len(self.token_ids) == self.request.decoding.max_new_tokens:
            finish_reason = "length"
        texts = [self._detokenizer.add(token) or "" for token in tokens]
        *offsets, self._num_characters = accumulate(map(len, texts), initial=self._num_characters)
        scored = [ScoredToken(offsets[found.place], found) for found in logprobs]
        text = self._held + "".join(texts)
        if finish_reason:
            text += self._detokenizer.flush()
        if found := [text.index(stop) for stop in self.stops if stop in text]:
            text = text[: min(found)]
            finish_reason = "stop"
        held = 0 if finish_reason else max((_overlap(text, stop) for stop in self.stops), default=0)
        text, self._held = text[: len(text) - held], text[len(text) - held :]
        return Piece(self.choice, text, list(tokens), finish_reason, scored)

    def fail(self, reason: str) -> None:
        """End it with an error."""
        self.put(Piece(self.choice, text=reason, token_ids=[], finish_reason="error"))


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of the text may be the beginning of a stop."""
    sizes = range(min(len(text), len(stop) - 1), 0, -1)
    return next((size for size in sizes if text.endswith(stop[:size])), 0)


class LocalService:
    """A loaded pair that answers requests in its thread.

    The arms share the runners of one engine, so only one arm decodes at a time. Answers and other work begin
    in the order in which they were asked for: an answer for the other arm waits until the batch has ended, and
    those behind it wait too.

    Args:
        open_engine: called in the thread, which alone touches the models.
        max_rows: the most answers that are generated together.
        max_waiting: the most answers beyond these that may wait.

    Raises:
        Exception: any of `open_engine`.
    """

    def __init__(
        self,
        open_engine: Callable[[], Engine],
        tokenizer: Tokenizer,
        max_rows: int,
        max_waiting: int,
    ) -> None:
        self._tokenizer = tokenizer
        self._max_rows = max_rows
        self._max_waiting = max_waiting
        self._lock = threading.Lock()
        self._waiting: deque[Answer] = deque()
        self._num_alone = 0
        # The batch: its arm and loop, and its answers by the numbers of their rows in that loop.
        self._arm: LocalArm | None = None
        self._loop: Loop | None = None
        self._rows: dict[int, Answer] = {}
        self._num_joined = 0
        self._is_turning = False
        self._is_closing = False
        # Set once answers that still run are failed.
        self._stopped = threading.Event()
        self._thread = ThreadPoolExecutor(1, "service")
        # The caller waits, so that the first request finds everything ready. It wakes now and then: a
        # signal that comes in the moment in which it falls asleep is handled only when it wakes.
        opening = self._thread.submit(open_engine)
        while not opening.done():
            futures.wait([opening], timeout=1.0)
        try:
            self._engine = opening.result()
        except Exception:
            self.close()
            raise
        self._arms: dict[str, Any] = {arm.name: arm for arm in self._engine.arms}

    @property
    def num_running(self) -> int:
        return len(self._rows)

    def is_running(self) -> bool:
        return not self._stopped.is_set()

    def ask(
        self,
        arm: str,
        requests: Sequence[Request],
        put: Callable[[Piece], None],
        *,
        stops: Sequence[str] = (),
        num_prompt_logprobs: int | None = None,
    ) -> list[Answer]:
        chosen = self._arms[arm]
        answers = [
            Answer(chosen, request, self._tokenizer, put, choice, stops, num_prompt_logprobs)
            for choice, request in enumerate(requests)
        ]
        with self._lock:
            self._check_room(len(answers))
            self._waiting += answers
            self._go_on()
        return answers

    def alone(self, work: Callable[[Engine], Result]) -> Future[Result]:
        with self._lock:
            self._check_room(1)
            self._num_alone += 1
            future = self._thread.submit(self._run_alone, work)
        future.add_done_callback(self._end_alone)
        return future

    def close(self, grace_s: float = 0.0) -> None:
        """Fail what waits now, and what still runs after `grace_s`; then end the thread."""
        with self._lock:
            if self._stopped.is_set():
                return
            self._is_closing = True
            waiting = list(self._waiting)
            self._waiting.clear()
            ending = self._thread.submit(self._finish)
        for answer in waiting:
            answer.fail(ENDING)
        futures.wait([ending], timeout=grace_s)
        with self._lock:
            self._stopped.set()
        # Not in the service's thread, whose iteration may take long.
        for answer in list(self._rows.values()):
            answer.fail(ENDING)
        self._thread.shutdown()

    def _check_room(self, num_more: int) -> None:
        if self._is_closing:
            raise Refusal(503, ENDING)
        num_asked = self.num_running + len(self._waiting) + self._num_alone + num_more
        if num_asked > self._max_rows + self._max_waiting:
            rule = f"at most {self._max_waiting} may wait (max_waiting)"
            raise Refusal(429, f"too many requests at once; {rule}")

    def _run_alone(self, work: Callable[[Engine], Result]) -> Result:
        self._finish()
        if self._is_closing:
            raise Refusal(503, ENDING)
        try:
            return work(self._engine)
        except Refusal:
            raise
        except Exception as error:
            raise Refusal(500, _reason(error)) from error

    def _end_alone(self, _: Future[Any]) -> None:
        with self._lock:
            self._num_alone -= 1

    def _finish(self) -> None:
        """Decode the batch to its end; nothing joins it."""
        while self._rows and not self._stopped.is_set():
            self._iterate([])

    def _turn(self) -> None:
        """One iteration of the batch, which answers that wait may join."""
        joining: list[Answer] = []
        with self._lock:
            # Answers join as soon as they no longer wait: `close` finds each in one of both.
            while self._waiting and len(self._rows) < self._max_rows:
                answer = self._waiting[0]
                if self._arm not in (None, answer.arm):
                    break
                self._waiting.popleft()
                if not answer.cancelled:
                    self._arm = answer.arm
                    self._rows[self._num_joined] = answer
                    self._num_joined += 1
                    joining.append(answer)
        if self._rows:
            self._iterate(joining)
        with self._lock:
            self._is_turning = False
            if (self._rows or self._waiting) and not self._is_closing:
                self._go_on()

    def _go_on(self) -> None:
        """Have the next turn taken, behind all that the thread was asked for."""
        if not self._is_turning:
            self._is_turning = True
            self._thread.submit(self._turn)

    def _iterate(self, joining: Sequence[Answer]) -> None:
        """The next iteration of all rows, or the first tokens of those that join."""
        arm = self._arm
        assert arm is not None
        try:
            with arm.explained():
                if self._loop is None:
                    self._loop = arm.loop(joining[0].request)
                for answer in joining:
                    if answer.num_prompt_logprobs is not None:
                        prompt = answer.request.prompt
                        logprobs = arm.prompt_logprobs(prompt, answer.num_prompt_logprobs)
                        answer.prompt_logprobs = logprobs
                if joining:
                    requests = [arm.loop_request(answer.request) for answer in joining]
                    iteration = self._loop.add(requests)
                else:
                    iteration = self._loop.step()
            for index, gain in enumerate(iteration.gains):
                answer = self._rows[gain.row]
                logprobs = arm.logprobs(answer.request, iteration, index)
                piece = answer.take(gain.tokens, len(gain.proposed), gain.num_accepted, logprobs)
                if piece.finish_reason is not None:
                    # Before its client knows: the next request of that client runs beside nothing.
                    self._leave([gain.row])
                answer.put(piece)
        except Exception as error:
            for answer in self._rows.values():
                answer.fail(_reason(error))
            self._leave(list(self._rows))
        # Once for each answer, because another thread may cancel it at any moment.
        self._leave([number for number, answer in self._rows.items() if answer.cancelled])

    def _leave(self, numbers: Sequence[int]) -> None:
        """Forget answers; the batch ends with the last one."""
        for number in numbers:
            del self._rows[number]
        if self._loop is not None:
            self._loop.drop(numbers)
        if not self._rows:
            self._loop = None
            self._arm = None
            self._num_joined = 0


def _reason(error: Exception) -> str:
    """Why an answer failed, in one line."""
    return str(as_run_error(error) or in_one_line(error))
