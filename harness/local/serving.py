"""Continuous batching: one thread owns the models; answers join and leave between iterations.

`LocalService` has a queue, a list of what runs, and a thread that lets the queue join that list before each iteration.
A `ServedAnswer` gets its tokens, iteration by iteration. It hands the pieces of text that become certain on to the
request that waits for it, and ends where the text stops.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, TypeVar

import torch

from harness.config.errors import in_one_line
from harness.config.failures import as_run_error
from harness.engines.detokenizer import Detokenizer
from harness.engines.door.serving import (
    ENDING,
    Piece,
    Refusal,
    ScoredToken,
    TokenLogprob,
)
from harness.engines.protocol import Engine, Request
from harness.engines.tokenizer import Tokenizer
from harness.local.decoding.loop import Loop
from harness.local.engine.engine import LocalArm
from harness.results.acceptance import outcome_until_end

Result = TypeVar("Result")


@dataclass(eq=False)
class ServedAnswer:
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
        outcomes: (num_proposed, num_accepted) of each iteration that drafted something, up to the end of the answer.
        row: its number in the loop; None until it joins.
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
    row: int | None = None

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
        proposed, accepted = outcome_until_end(num_proposed, num_accepted, len(tokens))
        if proposed:
            self.outcomes.append((proposed, accepted))
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
        places = {stop: text.find(stop) for stop in self.stops}
        ends = [(place + len(stop), place) for stop, place in places.items() if place >= 0]
        if ends:
            # Of the one that ends first, however many tokens an iteration brought; of two, the longer one.
            _, place = min(ends)
            text = text[:place]
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


class _Work:
    """Work that waits for its turn as answers do, and runs while none is generated.

    Attributes:
        arm: itself, so that nothing runs beside it.
    """

    row = None

    def __init__(self, work: Callable[[Engine], Any]) -> None:
        self.arm = self
        self.future: Future[Any] = Future()
        self._work = work

    @property
    def cancelled(self) -> bool:
        """Whether it has ended, or nobody waits for it any more."""
        return self.future.done()

    def run(self, engine: Engine) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self._work(engine))
        except Exception as error:
            is_worded = isinstance(error, Refusal)
            self.future.set_exception(error if is_worded else Refusal(500, _reason(error)))

    def fail(self, reason: str) -> None:
        """Refuse it, unless it runs: then it ends by itself."""
        if not self.future.running() and self.future.set_running_or_notify_cancel():
            self.future.set_exception(Refusal(503, reason))


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
        # Held where what waits or runs changes; notified when the thread may have something to do.
        self._changed = threading.Condition()
        self._waiting: deque[Any] = deque()
        # Answers of one arm, or one piece of work.
        self._running: list[Any] = []
        self._loop: Loop | None = None
        self._is_closing = False
        self._is_stopped = False  # what still ran has been failed
        opening: Future[Engine] = Future()
        self._thread = threading.Thread(target=self._serve, args=[open_engine, opening])
        self._thread.start()
        try:
            # So that the first request finds everything ready. This wakes now and then: a signal that
            # comes in the moment in which it falls asleep is handled only when it wakes.
            while not opening.done():
                futures.wait([opening], timeout=1.0)
            self._arms: dict[str, Any] = {arm.name: arm for arm in opening.result().arms}
        except BaseException:
            self.close()
            raise

    @property
    def num_running(self) -> int:
        return sum(isinstance(item, ServedAnswer) for item in self._running)

    def is_running(self) -> bool:
        return not self._is_stopped

    def ask(
        self,
        arm: str,
        requests: Sequence[Request],
        put: Callable[[Piece], None],
        *,
        stops: Sequence[str] = (),
        num_prompt_logprobs: int | None = None,
    ) -> list[ServedAnswer]:
        chosen = self._arms[arm]
        answers = [
            ServedAnswer(chosen, request, self._tokenizer, put, choice, stops, num_prompt_logprobs)
            for choice, request in enumerate(requests)
        ]
        self._add(answers)
        return answers

    def alone(self, work: Callable[[Engine], Result]) -> Future[Result]:
        waiting = _Work(work)
        self._add([waiting])
        return waiting.future

    def close(self, grace_s: float = 0.0) -> None:
        """Fail what waits now, and what still runs after `grace_s`; then end the thread."""
        with self._changed:
            self._is_closing = True
            waiting, self._waiting = self._waiting, deque()
            self._changed.notify()
        for item in waiting:
            item.fail(ENDING)
        self._thread.join(grace_s)
        with self._changed:
            self._is_stopped = True
            running, self._running = self._running, []
        # Not in the service's thread, whose iteration may take long.
        for item in running:
            item.fail(ENDING)
        self._thread.join()

    def _add(self, items: Sequence[Any]) -> None:
        """Have them wait for their turn. Raises Refusal where there is no room."""
        with self._changed:
            if self._is_closing:
                raise Refusal(503, ENDING)
            asked = [*self._running, *self._waiting, *items]
            if sum(not item.cancelled for item in asked) > self._max_rows + self._max_waiting:
                rule = f"at most {self._max_waiting} may wait (max_waiting)"
                raise Refusal(429, f"too many requests at once; {rule}")
            self._waiting += items
            self._changed.notify()

    @torch.inference_mode()
    def _serve(self, open_engine: Callable[[], Engine], opening: Future[Engine]) -> None:
        """Open the engine, and run what waits until the service is closed and nothing runs."""
        try:
            engine = open_engine()
        except BaseException as error:
            opening.set_exception(error)
            return
        opening.set_result(engine)
        while True:
            with self._changed:
                while not (self._admit() or self._is_closing):
                    self._changed.wait()
                running = list(self._running)
            if not running:
                return
            if isinstance(running[0], _Work):
                running[0].run(engine)
            else:
                self._iterate(running, [answer for answer in running if answer.row is None])
            for item in running:
                if item.cancelled:
                    self._leave(item)

    def _admit(self) -> bool:
        """Let join what waits first and may run beside what runs -> whether anything runs."""
        self._waiting = deque(item for item in self._waiting if not item.cancelled)
        while self._waiting and len(self._running) < self._max_rows:
            if self._running and self._running[0].arm is not self._waiting[0].arm:
                break
            self._running.append(self._waiting.popleft())
        return bool(self._running)

    def _iterate(self, running: Sequence[ServedAnswer], joining: Sequence[ServedAnswer]) -> None:
        """Decide the first tokens of answers that join, or else the next ones of all."""
        arm = running[0].arm
        try:
            with arm.explained():
                if self._loop is None:
                    self._loop = arm.loop(running[0].request)
                for answer in joining:
                    number = answer.num_prompt_logprobs
                    if number is not None:
                        answer.prompt_logprobs = arm.prompt_logprobs(answer.request.prompt, number)
                if joining:
                    requests = [arm.loop_request(answer.request) for answer in joining]
                    iteration = self._loop.add(requests)
                    for answer, row_step in zip(joining, iteration.row_steps, strict=True):
                        answer.row = row_step.row
                else:
                    iteration = self._loop.step()
        except Exception as error:
            if len(joining) > 1:
                # One by one, so that only those fail that fail alone.
                for answer in joining:
                    self._iterate(running, [answer])
            else:
                for answer in joining or running:
                    self._fail(answer, error)
            return
        answers = {answer.row: answer for answer in running}
        for row_step in iteration.row_steps:
            answer = answers[row_step.row]
            try:
                with arm.explained():
                    if row_step.error is not None:
                        raise row_step.error
                    logprobs = arm.logprobs(answer.request, iteration, row_step)
                piece = answer.take(
                    row_step.tokens, len(row_step.proposed), row_step.num_accepted, logprobs
                )
            except Exception as error:
                self._fail(answer, error)
                continue
            if piece.finish_reason is not None:
                # Before its client knows: the next request of that client runs beside nothing.
                self._leave(answer)
            answer.put(piece)

    def _fail(self, answer: ServedAnswer, error: Exception) -> None:
        self._leave(answer)
        answer.fail(_reason(error))

    def _leave(self, item: Any) -> None:
        """Forget what has ended; the loop ends with the last answer."""
        with self._changed:
            self._running = [other for other in self._running if other is not item]
        if self._loop is not None:
            self._loop.drop([item.row])
        if not self._running:
            self._loop = None


def _reason(error: Exception) -> str:
    """Why an answer failed, in one line."""
    return str(as_run_error(error) or in_one_line(error))
