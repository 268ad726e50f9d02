"""This project's own decoding loop as an engine, over the runners of a loaded pair.

An arm turns a `Question` into the loop's `Request`: random numbers, warp, limits. The loops of
`decoding.loops` decide the tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from harness.config.acceptance_rules import RULES
from harness.config.errors import SettingError
from harness.config.methods import METHODS
from harness.config.settings import DecodingSettings
from harness.engines.iteration import Iteration
from harness.engines.phases import Phases
from harness.engines.protocol import Answered, Arm, Engine, LoadRequest, Question, Traits
from harness.engines.record import Preparation
from harness.engines.requests import RequestRecord
from harness.local.decoding.adaptive import Adaptive
from harness.local.decoding.batch import Change, Records, Request
from harness.local.decoding.loops import autoregressive, speculative
from harness.local.decoding.protocols import Drafter, NonFiniteError
from harness.local.decoding.randomness import uniforms
from harness.local.decoding.tree_speculation import speculative_trees
from harness.local.decoding.warp import AnyWarp
from harness.local.drafting.checked import CheckedDrafter, blaming
from harness.local.drafting.method import MakeDrafter
from harness.local.engine.fault import fault_of
from harness.local.engine.logprobs import Burst, TokenLogprob, token_logprobs
from harness.local.engine.pair import Pair
from harness.local.engine.pair_runners import PairRunners, open_runners
from harness.local.engine.reference import ModelReference, not_finite
from harness.local.engine.rules import rule_of, tree_rule_of, warp_of
from harness.local.engine.stopwatches import PhaseTimer, stopwatches_of
from harness.local.engine.weights import loaded_weights
from harness.local.models.quantization import eight_bit_layers
from harness.local.runners.base import Options
from harness.local.runners.checks import plain_outputs
from harness.local.runners.graphs import release_memory
from harness.results.acceptance import outcome_of


@dataclass(frozen=True)
class LocalArm(Arm):
    """An arm of the local engine.

    Attributes:
        runners: of the loaded pair.
        policy: chooses K in each iteration where `decoding.num_draft_tokens` is `auto`, and learns
            from question to question.
        make_drafter: makes a drafter for a warp, for each question; None without a draft.
        fault: a mistake planted in the speculative arm.
        timer: times the phases of target and drafter; None for none.
        checks_rule: whether the numbers of a rule that is not built in are checked in the next question.
    """

    name: str
    runners: PairRunners
    policy: Adaptive
    make_drafter: MakeDrafter | None = None
    fault: str = "none"
    timer: PhaseTimer | None = None
    checks_rule: Callable[[], bool] | None = None
    traits = Traits(reports_drafts=True)

    def stream(self, question: Question) -> Records:
        """Records as they are decided; the iterator takes a `batch.Change` after each."""
        return self._explained(self._records(question))

    def answered(self) -> Answered:
        return Answered() if self.timer is None else Answered(phases=self.timer.phases)

    def request(self, question: Question) -> Request:
        """The loop's form of a question, which begins a batch or joins a running one."""
        decoding = question.decoding
        num_uniforms = self._num_uniforms(decoding)
        device = self.pair.target.input_device
        return Request(
            prompts=question.prompts,
            uniforms=uniforms(question.seed, question.indices, num_uniforms, device),
            warp=warp_of(decoding),
            max_new_tokens=decoding.max_new_tokens,
            stop_tokens=question.stop_tokens,
            keeps_logits=question.num_logprobs is not None,
        )

    def logprobs(self, question: Question, record: Iteration, place: int) -> list[TokenLogprob]:
        """The log-probabilities of the tokens that a row gained, for a question that asks for them.

        Args:
            place: of the row in the record.
        """
        assert question.num_logprobs is not None
        drafted: Sequence[float] = ()
        if record.verdict is not None:
            drafted = record.verdict.draft_probability[place].tolist()
        burst = Burst(
            logits=record.logits[record.rows[place]],
            tokens=record.tokens[place],
            num_top=question.num_logprobs,
            warp=warp_of(question.decoding),
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

        Trees and block verification take new ones in every iteration, for each node or draft token
        and the token after them. A longer stream begins with the shorter one, so that the first
        numbers are the same for every rule and both arms.
        """
        num_positions = decoding.max_new_tokens + 1
        if self.name == "regular":
            return num_positions
        if self._most_nodes:
            return num_positions * (self._most_nodes + 1)
        if RULES[decoding.rule].redraws:
            return num_positions * (decoding.most_draft_tokens + 1)
        return num_positions

    def under_load(
        self, requests: Sequence[LoadRequest], num_in_flight: int
    ) -> Iterator[RequestRecord]:
        """Records of requests that join and leave one batch between its turns.

        The loop numbers its rows in the order in which they join, so that row 5 is `requests[5]`. The
        next requests join in the turn after others have ended.
        """
        for request in requests:
            for name, value in request.parameters.items():
                raise SettingError(name, "needs engine=server", value)
        answers = [request.record(place) for place, request in enumerate(requests)]
        running = {0}
        num_joined = 1
        loop = self.stream(requests[0].question)
        record = next(loop)
        while True:
            ended = []
            for row, tokens, proposed, num_accepted in zip(
                record.rows, record.tokens, record.proposed, record.num_accepted, strict=True
            ):
                answer = answers[row]
                answer.token_ids += tokens
                answer.num_tokens += len(tokens)
                if proposed:
                    answer.outcomes.append(outcome_of(len(proposed), num_accepted, len(tokens)))
                question = requests[row].question
                is_stopped = tokens[-1] in question.stop_tokens
                is_full = answer.num_tokens >= question.decoding.max_new_tokens
                if is_stopped or is_full or answer.may_be_left:
                    ended.append(row)
            running.difference_update(ended)
            for row in ended:
                yield answers[row]
            room = num_in_flight - len(running)
            joining = range(num_joined, min(num_joined + room, len(requests)))
            num_joined += len(joining)
            running.update(joining)
            if not running:
                break
            joining_requests = [self.request(requests[row].question) for row in joining]
            record = loop.send(Change(ended, joining_requests))
        loop.close()

    @property
    def pair(self) -> Pair:
        return self.runners.pair

    @property
    def _most_nodes(self) -> int:
        """The most tokens of a proposed tree; 0 for a draft that proposes chains, or none."""
        return 0 if self.pair.draft_settings is None else self.pair.draft_settings.most_nodes

    def _records(self, question: Question) -> Records:
        """The loop's records; with stopwatches, the time in the target's `decide` is the phase `forward`, and the
        drafter's in `propose` the phase `drafting`.
        """
        request = self.request(question)
        decoding = question.decoding
        ahead = self.runners.works_ahead
        target: Any = self.runners.target
        if self.timer is not None:
            self.timer.phases = Phases()
            layers = eight_bit_layers(self.pair.target.model)
            target = self.timer.watch("forward", target, "decide", layers)
        if self.make_drafter is None:
            return autoregressive(target, request, ahead)
        fault = fault_of(self.fault)
        target = fault.runner(target)
        # Empty as yet: the loop puts those of the requests' rows into it, and the drafter reads the same object.
        warp = fault.warp()
        drafter: Any = self.make_drafter(warp)
        if self.timer is not None:
            model = self.runners.draft_model
            layers = [] if model is None else eight_bit_layers(model.model)
            proposes = "propose_tree" if self._most_nodes else "propose"
            drafter = self.timer.watch("drafting", drafter, proposes, layers)
        number = decoding.num_draft_tokens
        num_draft_tokens = self.policy if number == "auto" else number
        if self._most_nodes:
            return speculative_trees(
                target,
                drafter,
                request,
                depth=num_draft_tokens,
                budget=self._most_nodes,
                rule=tree_rule_of(decoding, self.fault),
                warp=warp,
            )
        reads_values = self.checks_rule is not None and self.checks_rule()
        verification, lenience = rule_of(decoding, self.fault, reads_values=reads_values)
        return speculative(
            target,
            drafter,
            request,
            num_draft_tokens=num_draft_tokens,
            lenience=lenience,
            verification=verification,
            redraw=RULES[decoding.rule].redraws,
            warp=warp,
            ahead=ahead,
        )

    def _explained(self, records: Records) -> Records:
        """The records; logits that are no numbers end them with an error that names the model, and
        anything unknown with one that names a draft that is not built in.
        """
        draft = self.pair.draft_settings
        blame: AbstractContextManager[None] = nullcontext()
        if self.name == "speculative" and draft and not METHODS.is_built_in(draft.method):
            blame = blaming(draft.name)
        try:
            with blame:
                yield from records
        except NonFiniteError as error:
            self.runners.clear()
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
        self._fault = preparation.fault
        self._has_checked_drafter = False
        self._has_checked_rule = False
        self.runners = open_runners(pair, preparation)
        self.weights = loaded_weights(pair.devices, ModelReference(self.runners))
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
        common = (self.runners, policy)
        arms = [LocalArm("regular", *common, None, self._fault, new_timer())]
        if make is not None:
            make = functools.partial(self._drafter, make)
            arms.append(
                LocalArm(
                    "speculative", *common, make, self._fault, new_timer(), self._takes_first_check
                )
            )
        return arms

    def _takes_first_check(self) -> bool:
        """True once, for the first question that asks."""
        is_first = not self._has_checked_rule
        self._has_checked_rule = True
        return is_first

    def _drafter(self, make: MakeDrafter, warp: AnyWarp) -> Drafter:
        """A drafter for a question. The first one of a method that is not built in is checked."""
        drafter = make(warp)
        settings = self._pair.draft_settings
        if settings is None or self._has_checked_drafter or METHODS.is_built_in(settings.method):
            return drafter
        self._has_checked_drafter = True
        return CheckedDrafter(drafter, settings.name, self._pair.vocabulary_size)
