"""The engine `local`: this project's own decoding loop, which runs a loaded pair.

An arm turns each request into a row of the loop, with random numbers, a warp and limits. `decoding.loop` decodes one
batch after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from harness.config.settings import DecodingSettings
from harness.engines.protocol import (
    Answered,
    Arm,
    Engine,
    NoteEnded,
    Request,
    Traits,
    Weights,
    in_batches,
)
from harness.engines.record import Preparation
from harness.local.decoding.iteration import BatchSize, Calls
from harness.local.decoding.loop import Loop, RowRequest, RowStep, Watch, size_of, unwatched
from harness.local.decoding.protocols import NonFiniteError
from harness.local.decoding.randomness import uniforms
from harness.local.drafting.checked import blaming_method
from harness.local.drafting.method import Pair
from harness.local.engine.clock import LoopClock, PhaseTimer
from harness.local.engine.preparing import prepare
from harness.local.engine.reference import ModelReference, loaded_weights, not_finite
from harness.local.engine.runners import PairRunners, num_random, open_runners, warp_of
from harness.local.models.devices import release_memory


@dataclass(frozen=True)
class LocalArm(Arm):
    """An arm of the local engine.

    Attributes:
        name: `regular` or `speculative`.
        runners: the runners of the loaded pair.
        weights: the models of the pair.
        drafts: whether the arm speculates.
    """

    name: str
    runners: PairRunners
    weights: Weights
    drafts: bool = False
    traits = Traits(reports_drafts=True)

    def answer(
        self,
        requests: Sequence[Request],
        in_flight: int,
        extra: Sequence[Request] = (),
        note_ended: NoteEnded | None = None,
    ) -> Answered:
        """Answer as `Arm.answer` does. The requests are divided into batches of `in_flight` rows. A batch begins when
        the last row of the batch before it has ended. `extra` requests are not sent.
        """
        clock = LoopClock(requests, self.weights)
        device = self.pair.target.input_device
        # The kernels of plain calls on a GPU are launched one by one, those of captured calls together.
        is_launched = device.type == "cuda" and not self.runners.prepared
        timer = PhaseTimer(device, is_launched=is_launched)
        num_begun = 0
        with torch.inference_mode(), clock.running():
            for batch in in_batches(requests, in_flight):
                first_request = num_begun
                num_begun += len(batch)
                with self.explained(batch):
                    loop, iteration = self.begin(batch, timer)
                    clock.note(iteration, first_request)
                    while loop.num_running:
                        clock.note(loop.step(), first_request)
                        if note_ended is not None:
                            note_ended(num_begun - loop.num_running)
                self.runners.num_decided.update(loop.num_decided)
        return clock.answered(timer.phases, as_batch=len(requests) <= in_flight, drafts=self.drafts)

    def loop_request(self, request: Request) -> RowRequest:
        """Return a request in the form that the loop needs, with its random numbers.

        The speculative arm may need more random numbers than the regular arm. Both streams begin with the same numbers
        (`randomness.uniforms`), whatever the acceptance rule.
        """
        decoding = request.decoding
        num_numbers = num_random(decoding) if self.drafts else decoding.max_new_tokens + 1
        device = self.pair.target.input_device
        return RowRequest(
            prompt=request.prompt,
            uniforms=uniforms(request.seed, request.index, num_numbers, device),
            warp=warp_of(decoding),
            max_new_tokens=decoding.max_new_tokens,
            stop_tokens=request.stop_tokens,
        )

    @property
    def pair(self) -> Pair:
        return self.runners.pair

    def begin(
        self, requests: Sequence[Request], watch: Watch = unwatched
    ) -> tuple[Loop, list[RowStep]]:
        """Begin a batch of requests that have the same K and acceptance rule. Returns the batch's loop, and the row
        steps with the first tokens.
        """
        asked = list(map(self.loop_request, requests))
        loop = Loop(self.calls(requests[0].decoding, size_of(asked)), watch)
        return loop, loop.start(asked, alone=requests[0].read_alone)

    def calls(self, decoding: DecodingSettings, batch: BatchSize) -> Calls:
        """Return the calls with which this arm decodes a batch."""
        return self.runners.calls(decoding, batch, drafts=self.drafts)

    @contextmanager
    def explained(self, requests: Sequence[Request]) -> Iterator[None]:
        """Explain the exceptions of the block. Logits that are not finite raise a RunError that names the model and the
        token. If a user's own method drafts, an exception of its code raises a RunError that names it
        (`blaming_method`). All other exceptions pass unchanged.

        Args:
            requests: the requests of the loop's rows, in the order of the rows.
        """
        try:
            with blaming_method(self.pair.draft_settings if self.drafts else None):
                yield
        except NonFiniteError as error:
            # The caches may contain nan now. They are freed, because a mask would not hide nan from later batches.
            self.runners.close()
            token = f"new token {error.position} of prompt {requests[error.row].index}"
            raise not_finite(self.pair, error.role, token) from error


class LocalEngine(Engine):
    """The engine that decodes with a loaded pair. The logits of both models are cut to the width that they share.

    Args:
        preparation: the kind of questions for which calls are prepared. Other questions are answered too, more slowly.

    Attributes:
        runners: the runners of the pair. They are closed when the engine is closed, and also if a model gives logits
            that are not finite.

    Raises:
        SettingError: no runner can run a model in the way that the run needs.
        RunError: a user's draft method fails.
    """

    def __init__(self, pair: Pair, preparation: Preparation) -> None:
        self.runners = open_runners(pair, preparation)
        prepare(self.runners, preparation)
        drafts = pair.draft_settings is not None
        verification_width = 1 + (preparation.decoding.most_draft_tokens if drafts else 0)
        reference = ModelReference(self.runners, verification_width, preparation.batch_size)
        self.weights: Weights = loaded_weights(pair, reference)
        self.runner = self.runners.target_name
        if self.runners.draft_name != self.runner:
            self.draft_runner = self.runners.draft_name
        self.setup_seconds = self.runners.setup_seconds
        self.is_spent = self.runners.is_spent
        arms = [LocalArm("regular", self.runners, self.weights)]
        if drafts:
            arms.append(LocalArm("speculative", self.runners, self.weights, drafts=True))
        self.arms: Sequence[Arm] = arms

    @property
    def prepared_share(self) -> float | None:
        num_decided = self.runners.num_decided
        if not self.runners.prepared or not num_decided:
            return None
        return num_decided[True] / num_decided.total()

    def close(self) -> None:
        """Free the runners. The pair stays loaded, because it belongs to the caller."""
        self.arms = ()
        self.runners.close()
        release_memory(self.runners.pair.devices)
