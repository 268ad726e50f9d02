"""This project's own decoding loop as an engine, over the runners of a loaded pair.

An arm turns requests that are alike into one of the loop: random numbers, warp, limits. `decoding.loop` decides the
tokens, in one batch that requests join and leave between its iterations.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from harness.config.acceptance_rules import RULES
from harness.config.errors import SettingError
from harness.config.methods import METHODS
from harness.config.settings import DecodingSettings
from harness.engines.arrivals import Watch
from harness.engines.phases import Phases
from harness.engines.protocol import Answered, Arm, Engine, Request, Traits, Weights
from harness.engines.record import Preparation
from harness.local.decoding import batch
from harness.local.decoding.adaptive import Adaptive
from harness.local.decoding.iteration import Iteration
from harness.local.decoding.loop import Loop, decoded
from harness.local.decoding.protocols import Drafter, NonFiniteError
from harness.local.decoding.randomness import uniforms
from harness.local.decoding.warp import AnyWarp
from harness.local.drafting.checked import blaming, with_checked_shapes
from harness.local.drafting.method import MakeDrafter
from harness.local.engine.clock import LoopClock
from harness.local.engine.fault import fault_of
from harness.local.engine.logprobs import Burst, TokenLogprob, token_logprobs
from harness.local.engine.pair import Pair
from harness.local.engine.pair_runners import PairRunners, open_runners
from harness.local.engine.reference import ModelReference, not_finite
from harness.local.engine.rules import rule_of, warp_of
from harness.local.engine.stopwatches import PhaseTimer, stopwatches_of
from harness.local.engine.weights import loaded_weights
from harness.local.models.devices import release_memory
from harness.local.models.quantization import eight_bit_layers
from harness.local.runners.base import Options
from harness.local.runners.checks import plain_outputs


@dataclass(frozen=True)
class LocalArm(Arm):
    """An arm of the local engine.

    Attributes:
        runners: of the loaded pair.
        weights: its models.
        policy: chooses K in each iteration where `decoding.num_draft_tokens` is `auto`, and learns
            from answer to answer.
        make_drafter: makes a drafter for a warp, for each answer; None without a draft.
        fault: a mistake planted in the speculative arm.
        timer: times the phases of target and drafter; None for none.
    """

    name: str
    runners: PairRunners
    weights: Weights
    policy: Adaptive
    make_drafter: MakeDrafter | None = None
    fault: str = "none"
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
        the turn after another has ended.

        The loop numbers its rows in the order in which they join, so that row 5 is `requests[5]`.
        """
        for request in requests:
            for name, value in request.parameters.items():
                raise SettingError(name, "needs engine=server", value)
        groups = _alike(requests[:in_flight])
        is_batch = len(requests) <= in_flight and len(groups) == 1
        is_batch = is_batch and not any(request.leave_after for request in requests)
        clock = LoopClock(requests, self.weights, watch)
        loop = self.loop(requests[0])
        begun = [*map(self.joining, groups)]
        with self.explained(), clock:
            if is_batch:
                for iteration in decoded(loop, begun):
                    clock.note(iteration)
            else:
                self._keep_in_flight(loop, begun, requests, in_flight, clock)
        phases = self.timer.phases if self.timer is not None else Phases()
        return clock.answered(phases, as_batch=is_batch)

    def _keep_in_flight(
        self,
        loop: Loop,
        begun: Sequence[batch.Request],
        requests: Sequence[Request],
        in_flight: int,
        clock: LoopClock,
    ) -> None:
        """Let requests join as there is room, until all have ended; `begun` are the first ones."""
        iteration = loop.add(begun)
        num_begun = min(in_flight, len(requests))
        running = set(range(num_begun))
        num_tokens: Counter[int] = Counter()
        while True:
            clock.note(iteration)
            for row, tokens in zip(iteration.rows, iteration.tokens, strict=True):
                request = requests[row]
                num_tokens[row] += len(tokens)
                most = min(request.leave_after or math.inf, request.decoding.max_new_tokens)
                if tokens[-1] in request.stop_tokens or num_tokens[row] >= most:
                    loop.drop([row])
                    running.remove(row)
            num_room = in_flight - len(running)
            joining = requests[num_begun : num_begun + num_room]
            if not joining and not running:
                return
            if not joining:
                iteration = loop.step()
                continue
            for row in range(num_begun, num_begun + len(joining)):
                running.add(row)
                clock.join(row)
            num_begun += len(joining)
            iteration = loop.add([*map(self.joining, _alike(joining))])

    def joining(self, requests: Sequence[Request]) -> batch.Request:
        """The loop's form of requests that are alike, which begin a batch or join a running one."""
        first = requests[0]
        num_uniforms = self._num_uniforms(first.decoding)
        device = self.pair.target.input_device
        indices = [request.index for request in requests]
        return batch.Request(
            prompts=[request.prompt for request in requests],
            uniforms=uniforms(first.seed, indices, num_uniforms, device),
            warp=warp_of(first.decoding),
            max_new_tokens=first.decoding.max_new_tokens,
            stop_tokens=first.stop_tokens,
            keeps_logits=first.num_logprobs is not None,
        )

    def logprobs(self, request: Request, record: Iteration, place: int) -> list[TokenLogprob]:
        """The log-probabilities of the tokens that a row gained, for a request that asks for them.

        Args:
            place: of the row in the record.
        """
        assert request.num_logprobs is not None
        drafted: Sequence[float] = ()
        if record.verdict is not None:
            drafted = record.verdict.draft_probability[place].tolist()
        burst = Burst(
            logits=record.logits[record.rows[place]],
            tokens=record.tokens[place],
            num_top=request.num_logprobs,
            warp=warp_of(request.decoding),
            draft_probabilities=drafted[: record.num_accepted[place]],
        )
        if self.name == "regular":
            return burst.logprobs()
        return fault_of(self.fault).logprobs(burst)

    def prompt_logprobs(self, prompt: Sequence[int], num_top: int) -> list[TokenLogprob]:
        """The log-probabilities of a prompt's tokens but the first, from one pass without a cache.

        It needs memory for logits of the whole prompt, and leaves a batch that is running alone.
        """
        if len(prompt) == 1:
            return []
        target = self.pair.target
        options: Options = {
            "vocabulary_size": self.pair.vocabulary_size,
            "device": target.input_device,
        }
        num_scored = len(prompt) - 1
        [logits] = plain_outputs(target.model, options, list(prompt[:-1]), num_scored)
        return token_logprobs(logits[0], prompt[1:], num_top)

    def _num_uniforms(self, decoding: DecodingSettings) -> int:
        """The random numbers of a row: one for each position, and one that a verification reads
        past the end.

        Block verification takes new ones in every iteration, for each draft token and the token after
        them. A longer stream begins with the shorter one, so that the first
        numbers are the same for every rule and both arms.
        """
        num_positions = decoding.max_new_tokens + 1
        if self.name == "regular":
            return num_positions
        if RULES[decoding.rule].redraws:
            return num_positions * (decoding.most_draft_tokens + 1)
        return num_positions

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
            layers = eight_bit_layers(self.pair.target.model)
            target = self.timer.watch("forward", target, "decide", layers)
        if self.make_drafter is None:
            return Loop(target)
        fault = fault_of(self.fault)
        target = fault.runner(target)
        # Empty as yet: the loop puts those of the requests' rows into it, and the drafter reads the same object.
        warp = fault.warp()
        drafter: Any = self.make_drafter(warp)
        if self.timer is not None:
            model = self.runners.draft_model
            layers = [] if model is None else eight_bit_layers(model.model)
            drafter = self.timer.watch("drafting", drafter, "propose", layers)
        number = decoding.num_draft_tokens
        verification, lenience = rule_of(decoding, self.fault)
        return Loop(
            target,
            drafter,
            self.policy if number == "auto" else number,
            lenience=lenience,
            verification=verification,
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
        if self.name == "speculative" and draft and not METHODS.is_built_in(draft.method):
            blame = blaming(draft.name)
        try:
            with blame:
                yield
        except NonFiniteError as error:
            self.runners.clear()
            raise not_finite(self.pair, error.role, f"new token {error.position}") from error


def _alike(requests: Sequence[Request]) -> list[list[Request]]:
    """The same in order, in lists of such that the loop reads as one."""

    def settings(request: Request) -> tuple[Any, ...]:
        asks_for_logprobs = request.num_logprobs is not None
        return (request.decoding, request.seed, request.stop_tokens, asks_for_logprobs)

    return [list(alike) for _, alike in itertools.groupby(requests, settings)]


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
        self._fault = preparation.fault
        self.runners = open_runners(pair, preparation)
        self.weights: Weights = loaded_weights(pair.devices, ModelReference(self.runners))
        self.runner = str(self.runners.names)
        self.setup_seconds = self.runners.setup_seconds
        self.arms = self._make_arms(self.runners.make_drafter)
        self.stopwatches = stopwatches_of(self.runners, self._make_arms)

    def close(self) -> None:
        """Free the runners; the pair is the caller's."""
        self.arms = ()
        self.stopwatches = None
        self.runners.close()
        release_memory(self._pair.devices)

    def _make_arms(
        self, make: MakeDrafter | None, new_timer: Callable[[], PhaseTimer | None] = lambda: None
    ) -> Sequence[Arm]:
        """The regular arm and, where there is a draft, the speculative one."""
        policy = Adaptive(self.runners.num_choices)
        common = (self.runners, self.weights, policy)
        arms = [LocalArm("regular", *common, None, self._fault, new_timer())]
        if make is not None:
            make = functools.partial(self._drafter, make)
            arms.append(LocalArm("speculative", *common, make, self._fault, new_timer()))
        return arms

    def _drafter(self, make: MakeDrafter, warp: AnyWarp) -> Drafter:
        """A drafter for an answer. The shapes of its proposals are checked if its method is not built in."""
        drafter = make(warp)
        settings = self._pair.draft_settings
        if settings is None or METHODS.is_built_in(settings.method):
            return drafter
        return with_checked_shapes(drafter, settings.name)
