"""Everything that a run of `latency` has measured so far, and groups of figures, which follow from that.

A group has fields of a row, each with its unit, its meaning and how it is pooled over runs, and the
function that computes them. A row is composed of groups (`rows.LatencyRow`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from harness.config.run import PromptedSettings
from harness.engines.counts import Counts, added
from harness.engines.divergence import Divergence
from harness.engines.door.plans import Roof
from harness.engines.protocol import Answered, Phases
from harness.engines.requests import RequestRecord
from harness.measuring.prompts.sets import PromptSet
from harness.measuring.quietness import Quietness
from harness.results.rows.prompts import LatencyPromptRow
from harness.results.statistics.interval import CONFIDENCE


@dataclass
class MeasuredArm:
    """The work of one arm.

    Attributes:
        generations: the timed answers to the questions, batch by batch, or lap by lap where
            requests are sent (`Answered.has_request_times`).
        phases: seconds and calls of each phase.
        divergences: of greedy speculative output from the regular one, by index of the prompt; None
            where there is none.
    """

    name: str
    generations: list[Answered] = field(default_factory=list)
    phases: Phases = field(default_factory=Phases)
    divergences: dict[int, Divergence | None] = field(default_factory=dict)

    @property
    def requests(self) -> list[RequestRecord]:
        return [request for generation in self.generations for request in generation.requests]

    @property
    def units(self) -> list[int]:
        """The unit of each generation (`Question.unit`)."""
        questions = [generation.question for generation in self.generations]
        return [0 if question is None else question.unit for question in questions]

    @property
    def answered(self) -> list[RequestRecord]:
        return [request for request in self.requests if request.answered]

    @property
    def evidence(self) -> dict[str, Any]:
        """Fields of `ArmEvidence` that no column holds."""
        read = {}
        for generation in self.generations:
            for prompt, request in generation.with_prompts:
                if request.num_read is not None:
                    read[request.index, *prompt] = request.num_read
        return {
            "lengths": {request.index: request.num_tokens for request in self.answered},
            "read": read,
        }

    @property
    def was_sent(self) -> bool:
        """Whether prompts were requests, kept in flight, so that each has its own time."""
        return any(generation.has_request_times for generation in self.generations)

    @property
    def counted(self) -> Counts | None:
        """Growth of the server's counters during all generations; None where it has none."""

        total: Counts | None = None
        for generation in self.generations:
            if generation.counted is not None:
                total = added(generation.counted, total or Counts())
        return total

    @property
    def counted_requests(self) -> list[RequestRecord]:
        """The requests of laps whose growth is known; the server counts those that only kept up the load, too."""
        requests: list[RequestRecord] = []
        for lap in self.generations:
            if lap.counted and lap.counted.is_known:
                requests += lap.requests
                requests += lap.load.extra if lap.load else ()
        return requests

    @property
    def begun_requests(self) -> list[RequestRecord]:
        """The counted requests that the server worked on."""
        requests = self.counted_requests
        return [request for request in requests if request.answered or request.was_left]

    @property
    def keeps_up_load(self) -> bool:
        """Whether there were requests that only kept up the load."""
        return any(lap.load is not None and lap.load.extra for lap in self.generations)

    @property
    def num_restarts(self) -> int:
        """How often the server was restarted meanwhile, as its counters show."""
        return 0 if self.counted is None else round(self.counted.restarts)


# What ended a run with `precision` or `budget`. `num_prompts` is the number asked for, `prompts` all that there are.
StoppedBy = Literal["precision", "budget", "blocks", "num_prompts", "prompts"]


@dataclass(frozen=True)
class MeasuredRun:
    """Everything that a run has measured so far; what it has not has its default.

    Attributes:
        arms: `regular`, then `speculative`, as far as they are measured.
        prompt_rows: the rows of all answers so far.
        in_blocks: whether each question is a block, with a start of each arm.
        salted: whether a server's prefix cache heeds salts; None where there is none.
        end_tokens: with which the model ends a text; empty with random weights, whose texts mean
            nothing.
        roofs: the bytes that a step reads and its least time: of the target, then of a draft with its own weights.
        stopped_by: what ended a run with `precision` or `budget`.
        confidence: level of the intervals of the speed-up.
    """

    settings: PromptedSettings
    prompt_set: PromptSet
    arms: Mapping[str, MeasuredArm]
    prompt_rows: list[LatencyPromptRow] = field(default_factory=list)
    in_blocks: bool = False
    salted: bool | None = None
    end_tokens: Collection[int] = frozenset()
    quietness: Quietness | None = None
    roofs: Sequence[Roof] = ()
    stopped_by: StoppedBy | None = None
    confidence: float = CONFIDENCE

    def rows_of(self, arm: MeasuredArm) -> list[LatencyPromptRow]:
        return [row for row in self.prompt_rows if row.arm == arm.name]

    def pair(self, arm: MeasuredArm) -> tuple[MeasuredArm, MeasuredArm] | None:
        """The regular arm and this one, where this one is compared with it."""
        if arm.name != "speculative" or "regular" not in self.arms:
            return None
        return self.arms["regular"], arm


@dataclass(frozen=True, kw_only=True)
class Group:
    """The figures of one arm that belong together; None for those that are not known."""

    @classmethod
    def measured(cls, run: MeasuredRun, arm: MeasuredArm) -> Group:
        """The group's figures of one of the run's arms."""
        raise NotImplementedError


def figures_of(kind: type[Group], run: MeasuredRun, arm: MeasuredArm) -> dict[str, Any]:
    """The known figures of an arm, by the names of their fields in a kind of row, which is composed of groups."""
    figures: dict[str, Any] = {}
    groups = [base for base in kind.__mro__ if issubclass(base, Group) and Group in base.__bases__]
    for group in groups:
        for name, value in vars(group.measured(run, arm)).items():
            if value is not None:
                figures[name] = value
    return figures
