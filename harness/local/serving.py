"""Answers one request after the other for `harness serve`. Only one thread uses the models.

A `ServedAnswer` receives the tokens of each iteration. It passes each piece of text on as soon as the text cannot
change any more. It ends at the first of the request's *stops*, texts at which the answer must end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from harness.config.errors import in_one_line
from harness.config.failures import as_run_error
from harness.engines.door.serving import ENDING, Piece, Refusal
from harness.engines.protocol import Engine, Request
from harness.engines.tokenizer import Detokenizer, Tokenizer
from harness.local.decoding.loop import RowStep
from harness.local.engine.engine import LocalArm


@dataclass(eq=False)
class ServedAnswer:
    """The answer to a request.

    Attributes:
        arm: the arm that generates the answer.
        request: the request.
        tokenizer: the model's tokenizer.
        put: called with each piece of the answer, as `LocalService.ask` states.
        choice: the index of this answer among the answers to the HTTP request.
        stops: texts at which the answer ends. They are not part of the answer.
        token_ids: the tokens so far.
        outcomes: (num_proposed, num_accepted) for each iteration that drafted something (`RowStep.outcome`). The
            iteration in which a stop ends the answer also counts draft tokens after the stop.
        job: the job that generates the answer; None until it is queued.
        is_cancelled: whether the answer is no longer needed.
    """

    arm: LocalArm
    request: Request
    tokenizer: Tokenizer
    put: Callable[[Piece | Refusal], None]
    choice: int = 0
    stops: Sequence[str] = ()
    token_ids: list[int] = field(default_factory=list)
    outcomes: list[tuple[int, int]] = field(default_factory=list)
    job: Future[Piece] | None = None
    is_cancelled: bool = False

    def __post_init__(self) -> None:
        self._detokenizer = Detokenizer(self.tokenizer, self.request.prompt)
        # The end of the text, if it may be the beginning of a stop: `EN` in `the EN` if a stop is `END`. It is held
        # back until that is decided.
        self._held = ""

    def take(self, step: RowStep) -> Piece:
        """Add the tokens of one iteration. Returns a piece with the text that cannot change any more.

        The piece contains all tokens of the iteration, including tokens of a stop and tokens after it.
        """
        tokens = step.tokens
        num_proposed, _ = step.outcome
        if num_proposed:
            self.outcomes.append(step.outcome)
        self.token_ids += tokens
        finish_reason = step.finish_reason
        text = self._held + "".join(self._detokenizer.add(token) or "" for token in tokens)
        if finish_reason:
            text += self._detokenizer.flush()
        starts = {stop: text.find(stop) for stop in self.stops}
        # The end and the start of each stop in the text: (7, 4) for `END` and (8, 5) for `ND.` in `the END.`.
        found = [(start + len(stop), start) for stop, start in starts.items() if start >= 0]
        if found:
            # The stop whose last character comes first counts. So the result does not depend on the number of tokens
            # in an iteration. If two stops have the same last character, the longer one counts.
            _, start = min(found)
            text = text[:start]
            finish_reason = "stop"
        held = 0 if finish_reason else max((_overlap(text, stop) for stop in self.stops), default=0)
        text, self._held = text[: len(text) - held], text[len(text) - held :]
        return Piece(self.choice, text, list(tokens), finish_reason)

    def cancel(self) -> None:
        """Cancel the answer because it is no longer needed. If it is being generated, it ends with the next iteration;
        if it is still queued, it never begins.
        """
        self.is_cancelled = True
        if self.job is not None:
            self.job.cancel()

    def end(self, job: Future[Piece]) -> None:
        """Pass on the last piece of a job that has ended, or the refusal with which it failed. For a job that was
        cancelled before it began, pass on nothing.
        """
        if job.cancelled():
            return
        try:
            self.put(job.result())
        except Refusal as refusal:
            self.put(refusal)


def _overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of a text may be the beginning of a stop: 2 for `the EN` and `END`."""
    sizes = range(min(len(text), len(stop) - 1), 0, -1)
    return next((size for size in sizes if text.endswith(stop[:size])), 0)


class LocalService:
    """Generates answers with a loaded pair, one after the other, in the order in which they were queued.

    Args:
        open_engine: returns the engine. It is called in the service's thread, the only thread that uses the models.
        tokenizer: the model's tokenizer.
        max_waiting: the largest number of answers that may wait while another answer is generated.

    Raises:
        Exception: any exception of `open_engine`.
    """

    def __init__(
        self, open_engine: Callable[[], Engine], tokenizer: Tokenizer, max_waiting: int
    ) -> None:
        self._tokenizer = tokenizer
        self._max_waiting = max_waiting
        # This lock is held while answers are queued, and while closing begins.
        self._lock = threading.Lock()
        self._jobs: list[Future[Piece]] = []
        self._is_closing = False
        # Set to False to end the answer that is still being generated.
        self.is_running = True
        self._thread = ThreadPoolExecutor(1)
        # Inference mode is a state of a thread, so the service's thread enters it, here and in `_generate`.
        opening = self._thread.submit(torch.inference_mode()(open_engine))
        try:
            # Wait until the engine is open, so that everything is ready for the first request. The wait is repeated
            # every second, because a signal that arrives just when a wait begins is handled only when the wait ends.
            while not opening.done():
                futures.wait([opening], timeout=1.0)
            self._engine = opening.result()
        except BaseException:
            self.close()
            raise
        self._arms: dict[str, Any] = {arm.name: arm for arm in self._engine.arms}

    def ask(
        self,
        arm: str,
        requests: Sequence[Request],
        put: Callable[[Piece | Refusal], None],
        stops: Sequence[str] = (),
    ) -> list[ServedAnswer]:
        """Queue requests for an arm, and return their answers, which are generated later.

        Args:
            arm: the name of the arm.
            put: called with each piece of the answers, in the service's thread. (If an answer ends before this function
                returns, its last piece may come in the thread of the caller.)
            stops: texts at which an answer ends.

        Raises:
            Refusal: the queue has no room for all of the requests, or the service is ending.
        """
        answers = [
            ServedAnswer(self._arms[arm], request, self._tokenizer, put, choice, stops)
            for choice, request in enumerate(requests)
        ]
        with self._lock:
            if self._is_closing:
                raise Refusal(503, ENDING)
            self._jobs = [job for job in self._jobs if not job.done()]
            if len(self._jobs) + len(answers) > 1 + self._max_waiting:
                rule = f"at most {self._max_waiting} may wait (max_waiting)"
                raise Refusal(429, f"too many requests at once; {rule}")
            jobs = [self._thread.submit(self._generate, answer) for answer in answers]
            self._jobs += jobs
        for answer, job in zip(answers, jobs, strict=True):
            answer.job = job
            job.add_done_callback(answer.end)
        return answers

    def close(self, grace_s: float = 0.0) -> None:
        """Stop accepting and beginning answers, wait up to `grace_s` seconds for the running one, and end the thread.
        An answer that has not ended by then ends with the next iteration.
        """
        with self._lock:
            self._is_closing = True
        futures.wait(self._jobs, timeout=grace_s)
        self.is_running = False
        self._thread.shutdown()

    @torch.inference_mode()
    def _generate(self, answer: ServedAnswer) -> Piece:
        """Generate an answer. Each piece but the last is passed on as soon as it exists; the last piece is returned.

        Raises:
            Refusal: the service is ending, or generating fails: a model's logits are not finite, or a user's draft
                method fails.
        """
        if self._is_closing:
            raise Refusal(503, ENDING)
        arm = answer.arm
        try:
            with arm.explained([answer.request]):
                loop, iteration = arm.begin([answer.request])
                while True:
                    [step] = iteration
                    piece = answer.take(step)
                    if piece.finish_reason is not None or answer.is_cancelled:
                        return piece
                    if not self.is_running:
                        raise Refusal(503, ENDING)
                    answer.put(piece)
                    iteration = loop.step()
        except Refusal:
            raise
        except Exception as error:
            raise Refusal(500, str(as_run_error(error) or in_one_line(error))) from error
