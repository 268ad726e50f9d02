"""This project's own decoding loop as an engine, over the runners of a loaded pair.

An arm turns each request into one of the loop: random numbers, warp, limits. `decoding.loop` decides the tokens, in one
batch that requests join and leave between its iterations.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from harness.config.acceptance_rules import RULES
from harness.config.errors import SettingError
from harness.config.methods import METHODS
from harness.engines.arrivals import Watch
from harness.engines.door.serving import TokenLogprob
from harness.engines.phases import Phases
from harness.engines.protocol import Answered, Arm, Engine, Request, Traits, Weights
from harness.engines.record import Preparation
from harness.local.decoding.loop import Iteration, Loop, RowRequest, RowStep
from harness.local.decoding.protocols import NonFiniteError
from harness.local.decoding.randomness import uniforms
from harness.local.decoding.verify import AcceptByCoin
from harness.local.decoding.warp import BatchWarp
from harness.local.drafting.checked import blaming, checked_rule
from harness.local.drafting.method import Pair
from harness.local.engine.clock import LoopClock
from harness.local.engine.fault import NONE, Fault, fault_of
from harness.local.engine.reference import ModelReference, loaded_weights, not_finite
from harness.local.engine.runners import PairRunners, open_runners, warp_of
from harness.local.engine.stopwatches import PhaseTimer, stopwatches_of
from harness.local.models.devices import release_memory
from harness.local.runners.base import Options
from harness.local.runners.checks import plain_outputs

# In place of minus infinity, which JSON does not have; vLLM's number.
LEAST = -9999.0


@dataclass(frozen=True)
class LocalArm(Arm):
    """An arm of the local engine.

    Attributes:
        runners: of the loaded pair.
        weights: its models.
        drafts: whether it speculates.
        fault: a mistake planted in the arm.
        timer: times the phases of target and drafter; None for none.
    """

    name: str
    runners: PairRunners
    weights: Weights
    drafts: bool = False
    fault: Fault = NONE
    timer: PhaseTimer | None = None
    traits = Traits(reports_drafts=True)

    def answer(
        self,
        requests: Sequence[Request],
        in_flight: int,
        extra: Sequence[Request] = (),
        watch: Watch | None = None,
    ) -> Answered:
        """All requests at once are a batch, whose rows share their time; of more than may be in flight each joins in
        the iteration after another has ended.

        The loop numbers its rows in the order in which they join, so that row 5 is `requests[5]`.
        """
        for request in requests:
            for name, value in request.parameters.items():
                raise SettingError(name, "needs engine=server", value)
        clock = LoopClock(requests, self.weights, watch)
        loop = self.loop(requests[0])
        waiting = deque(map(self.loop_request, requests))
        join_alone = any(request.joins_alone for request in requests)
        with self.explained(), torch.inference_mode(), clock.running():
            while waiting or loop.num_running:
                joining: list[RowRequest] = []
                while waiting and len(joining) < in_flight - loop.num_running:
                    if join_alone and joining and waiting[0].prompt != joining[0].prompt:
                        break
                    joining.append(waiting.popleft())
                iteration = loop.add(joining) if joining else loop.step()
                clock.note(iteration.sound())
        is_batch = len(requests) <= in_flight and not any(
            request.leave_after for request in requests
        )
        phases = self.timer.phases if self.timer is not None else Phases()
        return clock.answered(phases, as_batch=is_batch, drafts=self.drafts)

    def loop_request(self, request: Request) -> RowRequest:
        """A request as the loop takes it, with its random numbers: one for each position, and one that a
        verification reads past the end.

        Where a rule redraws, each iteration takes new ones for each draft token.
        A longer stream begins with the shorter one, so that the first numbers are the same for every
        rule and both arms.
        """
        decoding = request.decoding
        num_numbers = decoding.max_new_tokens + 1
        if self.drafts and RULES[decoding.rule].redraws:
            num_numbers *= decoding.most_draft_tokens + 1
        device = self.pair.target.input_device
        return RowRequest(
            prompt=request.prompt,
            uniforms=uniforms(request.seed, request.index, num_numbers, device),
            warp=warp_of(decoding),
            max_new_tokens=decoding.max_new_tokens,
            stop_tokens=request.stop_tokens,
            leave_after=request.leave_after,
            keeps_logits=request.num_logprobs is not None,
        )

    def logprobs(
        self, request: Request, iteration: Iteration, row_step: RowStep
    ) -> list[TokenLogprob]:
        """The log-probabilities of the tokens that a row gained; [] for a request that does not ask for them."""
        if request.num_logprobs is None:
            return []
        return token_logprobs(iteration.logits[row_step.row], row_step.tokens, request.num_logprobs)

    def prompt_logprobs(self, prompt: Sequence[int], num_top: int) -> list[TokenLogprob]:
        """The log-probabilities of a prompt's tokens but the first, from one pass without a cache.

        It needs memory for logits of the whole prompt, and leaves a batch that is running alone.
        """
        if len(prompt) == 1:
            return []
        options: Options = {"vocabulary_size": self.pair.vocabulary_size}
        model = self.pair.target.model
        [logits] = plain_outputs(model, options, list(prompt[:-1]), len(prompt) - 1)
        return token_logprobs(logits, prompt[1:], num_top)

    @property
    def pair(self) -> Pair:
        return self.runners.pair

    def loop(self, first: Request) -> Loop:
        """A loop for a request, and for others with its K and rule.

        With stopwatches, the time in the target's `decide` is the phase `forward`, and the drafter's in `propose` the
        phase `drafting`.
        """
        decoding = first.decoding
        target: Any = self.runners.target
        if self.timer is not None:
            self.timer.phases = Phases()
            target = self.timer.watch("forward", target, "decide")
        if not self.drafts:
            return Loop(target)
        target = self.fault.runner(target)
        # Empty as yet: the loop puts those of the requests' rows into it, and the drafter reads the same object.
        warp = BatchWarp()
        drafter: Any = self.runners.drafter(warp)
        if self.timer is not None:
            drafter = self.timer.watch("drafting", drafter, "propose")
        rates = decoding.synthetic_rates
        rule = RULES[decoding.rule].verification(decoding) if rates is None else AcceptByCoin(rates)
        if rates is None and not RULES.is_built_in(decoding.rule):
            rule = checked_rule(rule, decoding.rule)
        if self.fault is not NONE:
            rule = functools.partial(self.fault.verdict, rule, warp)
        return Loop(
            target,
            drafter,
            decoding.most_draft_tokens,
            verification=rule,
            redraw=RULES[decoding.rule].redraws,
            warp=warp,
        )

    @contextmanager
    def explained(self) -> Iterator[None]:
        """In this block logits that are no numbers end with an error that names the model, and anything unknown with
        one that names a draft that is not built in.
        """
        draft = self.pair.draft_settings
        blame: AbstractContextManager[None] = nullcontext()
        if self.drafts and draft is not None and not METHODS.is_built_in(draft.method):
            blame = blaming(draft.name)
        try:
            with blame:
                yield
        except NonFiniteError as error:
            raise not_finite(self.pair, error.role, f"new token {error.position}") from error


class LocalEngine(Engine):
    """An `Engine` over a loaded pair; logits of both models are cut to the vocabulary they share.

    Args:
        preparation: for which runners are prepared; other questions are answered more slowly.

    Attributes:
        runners: of the pair, until the engine is closed.

    Raises:
        SettingError: for a runner that the devices do not have.
    """

    def __init__(self, pair: Pair, preparation: Preparation) -> None:
        self._pair = pair
        self._fault = fault_of(preparation.fault)
        self.runners = open_runners(pair, preparation)
        drafts = pair.draft_settings is not None
        width = 1 + (preparation.decoding.most_draft_tokens if drafts else 0)
        reference = ModelReference(self.runners, width, preparation.batch_size)
        self.weights: Weights = loaded_weights(pair, reference)
        self.runner = self.runners.target_name
        if self.runners.draft_name != self.runner:
            self.draft_runner = self.runners.draft_name
        self.setup_seconds = self.runners.setup_seconds
        self.arms = self._make_arms()
        self.stopwatches = stopwatches_of(self.runners, self._make_arms)

    def close(self) -> None:
        """Free the runners; the pair is the caller's."""
        self.arms = ()
        self.stopwatches = None
        self.runners.close()
        release_memory(self._pair.devices)

    def _make_arms(
        self, new_timer: Callable[[], PhaseTimer | None] = lambda: None
    ) -> Sequence[Arm]:
        """The regular arm and, where there is a draft, the speculative one."""
        common = (self.runners, self.weights)
        arms = [LocalArm("regular", *common, timer=new_timer())]
        if self._pair.draft_settings is not None:
            timer = new_timer()
            arms.append(
                LocalArm("speculative", *common, drafts=True, fault=self._fault, timer=timer)
            )
        return arms


def token_logprobs(logits: Tensor, tokens: Sequence[int], num_top: int) -> list[TokenLogprob]:
    """The log-probabilities of tokens under the logits [at least n, V] that come before each."""
    logprobs = logits[: len(tokens)].float().log_softmax(-1).clamp(min=LEAST)
    chosen = logprobs.gather(1, torch.tensor(tokens, device=logprobs.device).unsqueeze(1))
    ranks = 1 + (logprobs > chosen).sum(1)
    likeliest = logprobs.topk(num_top)
    rows = zip(
        tokens,
        chosen[:, 0].tolist(),
        ranks.tolist(),
        likeliest.indices.tolist(),
        likeliest.values.tolist(),
        strict=True,
    )
    return [
        TokenLogprob(index, token, logprob, rank, list(zip(top_tokens, top_logprobs, strict=True)))
        for index, (token, logprob, rank, top_tokens, top_logprobs) in enumerate(rows)
    ]
