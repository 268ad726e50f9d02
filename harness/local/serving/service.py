"""An engine whose arms answer requests as they come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future

from harness.engines.door.serving import Piece, Refusal, Result
from harness.engines.protocol import Engine, Request
from harness.engines.tokenizer import Tokenizer
from harness.local.engine.engine import LocalArm
from harness.local.engine.fault import Asked, fault_of
from harness.local.serving.answers import Answer
from harness.local.serving.scheduler import Scheduler, reason_of


class LocalService(Scheduler):
    """A scheduler with the engine that it runs.

    Args:
        open_engine: called in the scheduler's thread, which alone touches the models.
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
        super().__init__(max_rows, max_waiting)
        self._tokenizer = tokenizer
        # This thread waits, so that the first request finds everything ready. It wakes now and then: a
        # signal that comes in the moment in which it falls asleep is handled only when it wakes.
        opening = self.run_alone(open_engine)
        while not opening.done():
            futures.wait([opening], timeout=1.0)
        try:
            self._engine = opening.result()
        except Exception:
            self.close()
            raise
        self._arms: dict[str, LocalArm] = {}
        for arm in self._engine.arms:
            assert isinstance(arm, LocalArm)
            self._arms[arm.name] = arm

    def ask(
        self,
        arm: str,
        requests: Sequence[Request],
        put: Callable[[Piece], None],
        *,
        stops: Sequence[str] = (),
        num_prompt_logprobs: int | None = None,
    ) -> list[Answer]:
        answers = []
        for choice, request in enumerate(requests):
            own_arm = self._arms[arm]
            asked = Asked(
                request.decoding,
                len(request.prompt),
                request.num_logprobs is not None,
                bool(stops),
                self.num_running,
            )
            if fault_of(own_arm.fault).falls_back(asked):
                own_arm = self._arms["regular"]
            answers.append(
                Answer(
                    own_arm,
                    request,
                    self._tokenizer,
                    put,
                    choice=choice,
                    stops=stops,
                    num_prompt_logprobs=num_prompt_logprobs,
                )
            )
        self.submit(answers)
        return answers

    def alone(self, work: Callable[[Engine], Result]) -> Future[Result]:
        def run() -> Result:
            try:
                return work(self._engine)
            except Refusal:
                raise
            except Exception as error:
                raise Refusal(500, reason_of(error)) from error

        return self.run_alone(run)
