"""This project's own decoding loop as an engine, over the runners of a loaded pair."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from harness.config.run import RunnerName
from harness.config.settings import DecodingSettings, Fault
from harness.decoding.adaptive import Adaptive
from harness.decoding.batch import Records, Request
from harness.decoding.loops import autoregressive, speculative
from harness.decoding.protocols import NonFiniteError
from harness.decoding.randomness import uniforms
from harness.decoding.tree_speculation import speculative_trees
from harness.decoding.warp import BatchWarp
from harness.engines.acceptance import acceptance_of, tree_rule_of, warp_of
from harness.engines.faults import faulty_runner, faulty_warp
from harness.engines.load import keep_in_flight
from harness.engines.pair import Pair
from harness.engines.pair_runners import Demanded, PairRunners, open_runners
from harness.engines.pass_times import pass_ms, pass_widths
from harness.engines.protocol import Arm, Engine, LoadRequest, Question
from harness.engines.reference import ModelReference, not_finite
from harness.engines.requests import RequestRecord
from harness.engines.stopwatches import Phases
from harness.models.devices import release_memory
from harness.models.quantization import eight_bit_layers
from harness.models.ranks import of_rank_0
from harness.runners.snapshot import SnapshotRunner


@dataclass(frozen=True)
class LocalArm(Arm):
    """An arm of the local engine.

    Attributes:
        pair: the models.
        runners: of the pair.
        policy: chooses the number of draft tokens for `auto`; it learns from question to question.
        fault: a mistake planted in the speculative arm.
        phases: stopwatches, where they run.
    """

    name: str
    pair: Pair
    runners: PairRunners
    policy: Adaptive
    fault: Fault = "none"
    phases: Phases | None = None
    tells = frozenset({"origins", "proposals", "probabilities"})

    def stream(self, question: Question) -> Records:
        """See `Arm.stream`. It takes a `batch.Change` after each record."""
        request = self.request(question)
        if self.name == "regular":
            return self._explained(self._regular(request))
        return self._explained(self._speculative(request, question.decoding))

    def request(self, question: Question) -> Request:
        """The loop's form of a question, at its start or when the question joins one that runs."""
        decoding = question.decoding
        num_positions = decoding.max_new_tokens + 1
        if self.name == "speculative" and self._most_nodes:
            num_positions *= self._most_nodes + 1
        elif self.name == "speculative" and decoding.rule == "block":
            # Its iterations draw new numbers, see `speculative`; a longer stream begins with the
            # shorter one.
            num_positions *= decoding.most_draft_tokens + 1
        device = self.pair.target.input_device
        return Request(
            prompts=question.prompts,
            uniforms=uniforms(question.seed, question.indices, num_positions, device),
            warp=warp_of(decoding),
            max_new_tokens=decoding.max_new_tokens,
            stop_tokens=question.stop_tokens,
        )

    def under_load(
        self, requests: Sequence[LoadRequest], num_in_flight: int
    ) -> Iterator[RequestRecord]:
        """See `Arm.under_load`. Requests join and leave one batch between its turns."""
        records = self.stream(requests[0].question)
        return keep_in_flight(records, self.request, requests, num_in_flight)

    @property
    def _most_nodes(self) -> int:
        return 0 if self.pair.draft_settings is None else self.pair.draft_settings.most_nodes

    def _target(self) -> Any:
        target = self.runners.target
        if self.phases is None:
            return target
        layers = eight_bit_layers(self.pair.target.model)
        watched = self.phases.watch("forward", target, "decide", layers)
        if self._most_nodes:
            watched = self.phases.watch("forward", watched, "decide_tree", layers)
        return watched

    def _drafter(self, warp: BatchWarp) -> Any:
        make = self.runners.make_drafter
        assert make is not None
        drafter = make(warp)
        if self.phases is None:
            return drafter
        model = self.runners.draft_model
        layers = () if model is None else eight_bit_layers(model.model)
        proposes = "propose_tree" if self._most_nodes else "propose"
        return self.phases.watch("drafting", drafter, proposes, layers)

    def _regular(self, request: Request) -> Records:
        return autoregressive(self._target(), request, self.runners.works_ahead, agree=of_rank_0)

    def _speculative(self, request: Request, decoding: DecodingSettings) -> Records:
        warp = faulty_warp(self.fault)
        target: Any = faulty_runner(self.fault, self._target())
        number = decoding.num_draft_tokens
        num_draft_tokens = self.policy if number == "auto" else number
        if self._most_nodes:
            return speculative_trees(
                target,
                self._drafter(warp),
                request,
                depth=num_draft_tokens,
                budget=self._most_nodes,
                rule=tree_rule_of(decoding, self.fault),
                warp=warp,
                agree=of_rank_0,
            )
        acceptance = acceptance_of(decoding, self.fault)
        return speculative(
            target,
            self._drafter(warp),
            request,
            num_draft_tokens,
            acceptance.lenience,
            acceptance.verification,
            redraw=decoding.rule == "block",
            warp=warp,
            ahead=self.runners.works_ahead,
            agree=of_rank_0,
        )

    def _explained(self, records: Records) -> Records:
        try:
            yield from records
        except NonFiniteError as error:
            raise not_finite(self.pair, error.role, f"new token {error.position}") from error


class LocalEngine(Engine):
    """An `Engine` over a loaded pair; logits of both models are cut to the vocabulary they share.

    Args:
        decoding: what runners are prepared for. Questions may differ from it, and are then answered
            more slowly.
        runner: which one; a model that cannot have it gets a plainer one, and `say` one line with
            the reason.
        batch_size: the most rows of a batch that a runner is prepared for.
        longest_prompt: the most tokens of a prompt that a runner is prepared for.
        share_prefix: read the common beginning of a batch's prompts only once.
        fault: a mistake to plant in the speculative arm.

    Attributes:
        runners: of the pair, until the engine is closed.

    Raises:
        SettingError: for a runner that the devices do not have.
    """

    def __init__(
        self,
        pair: Pair,
        decoding: DecodingSettings,
        *,
        runner: RunnerName = "auto",
        batch_size: int = 1,
        longest_prompt: int = 0,
        share_prefix: bool = False,
        fault: Fault = "none",
        say: Callable[[str], None] = lambda message: None,
    ) -> None:
        demanded = Demanded(
            decoding=decoding,
            runner=runner,
            batch_size=batch_size,
            longest_prompt=longest_prompt,
            share_prefix=share_prefix,
            fault=fault,
        )
        self._pair = pair
        self._fault: Fault = fault
        self.runners = open_runners(pair, demanded, say)
        self._reference = ModelReference(pair, self.runners)
        self.devices = pair.devices
        self.runner = self.runners.name
        self.setup_seconds = self.runners.setup_seconds
        self.arms: Sequence[Arm] = self._make_arms()

    @property
    def reference(self) -> ModelReference:
        return self._reference

    @property
    def watches_freely(self) -> bool:
        """See `Engine.watches_freely`. GPUs would be waited for, and each layer of 8 bits be
        timed.
        """
        for model in (self._pair.target, self.runners.draft_model):
            if model is not None and eight_bit_layers(model.model):
                return False
        return all(device.type == "cpu" for device in self.devices)

    def watched(self) -> Sequence[tuple[Arm, Phases]]:
        watched: list[tuple[Arm, Phases]] = []
        for number in range(len(self.arms)):
            phases = Phases(self.devices)
            arms = self._make_arms(phases)
            watched.append((arms[number], phases))
        return watched

    def pass_ms(self, question: Question) -> list[float | None] | None:
        """See `Engine.pass_ms`.

        Prepared runners have few widths, and read others more slowly. A recurrent state also reads
        again what was kept before.
        """
        number = question.decoding.num_draft_tokens
        target_runner, _, _ = self.runners.name.partition("+")
        if number == "auto" or target_runner not in ("eager", "static"):
            return None
        if isinstance(self.runners.target, SnapshotRunner):
            return None
        # A text must have room for the widest pass.
        if self.runners.make_drafter is None or number >= question.decoding.max_new_tokens:
            return None
        widths = pass_widths(number)
        return pass_ms(self.runners.target, question.prompts, widths, self.devices)

    def close(self) -> None:
        """See `Engine.close`. The pair is the caller's."""
        self.arms = ()
        self.runners.close()
        release_memory(self.devices)

    def _make_arms(self, phases: Phases | None = None) -> list[Arm]:
        names = ["regular"]
        if self.runners.make_drafter is not None:
            names.append("speculative")
        policy = Adaptive(self.runners.num_choices)
        return [
            LocalArm(name, self._pair, self.runners, policy, self._fault, phases) for name in names
        ]
