"""Everything that a run of `latency` has measured so far, and the base class of the groups of figures that follow from
it.

A group defines fields of a row, each with its unit, its meaning and the rule by which repeated runs are pooled, and it
has the function that computes these fields. A row is composed of groups (`rows.LatencyRow`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from harness.config.run import PromptedSettings
from harness.engines.counts import Counts, added
from harness.engines.divergence import Divergence
from harness.engines.protocol import Answered, Phases
from harness.engines.requests import RequestRecord
from harness.measuring.prompts.sets import PromptSet
from harness.measuring.quietness import Quietness
from harness.results.rows.prompts import LatencyPromptRow
from harness.results.statistics.interval import CONFIDENCE


@dataclass
class MeasuredArm:
    """The measured work of one arm.

    Attributes:
        generations: the timed answers to the questions: one for each batch, or for each lap if the engine keeps
            requests in flight (`Answered.has_request_times`).
        between: growth of the server's counters while this run sent nothing to the server, between the run's first and
            last reading of them; None if unknown.
        phases: seconds and calls of each phase of harness's own decoding loop.
        divergences: where each greedy speculative text diverges from the regular one, by the index of its request; None
            for equal texts. Texts that were not compared are missing.
    """

    name: str
    generations: list[Answered] = field(default_factory=list)
    phases: Phases = field(default_factory=Phases)
    between: Counts | None = None
    divergences: dict[int, Divergence | None] = field(default_factory=dict)

    @property
    def requests(self) -> list[RequestRecord]:
        return [request for generation in self.generations for request in generation.requests]

    @property
    def answered(self) -> list[RequestRecord]:
        return [request for request in self.requests if request.answered]

    @property
    def evidence(self) -> dict[str, Any]:
        """Two fields of `ArmEvidence` (`results.verdict`) that are in no column, by name.

        `lengths` has the number of tokens of each answer, by the index of its request. `read` has the number of prompt
        tokens that the server counted, if it counts them. Its keys are tuples: the index and then the prompt's token
        ids, because later turns of the two arms may have the same index and different prompts.
        """
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
        """Whether prompts were sent as single requests, each of which has its own times."""
        return any(generation.has_request_times for generation in self.generations)

    @property
    def counted(self) -> Counts | None:
        """The sum of all questions' `Answered.counted`. If the server restarted during a question, only the restarts of
        that question are added. A question whose counters could not be read is left out. None if no question had any.
        """
        total: Counts | None = None
        for generation in self.generations:
            if generation.counted is not None:
                total = added(generation.counted, total or Counts())
        return total

    @property
    def counted_requests(self) -> list[RequestRecord]:
        """The requests of all laps for which the growth of the counters is known. Requests that only kept up the load
        are included, because the server counts them, too.
        """
        requests: list[RequestRecord] = []
        for lap in self.generations:
            if lap.counted and lap.counted.is_known:
                requests += lap.requests
                requests += lap.load.extra if lap.load else ()
        return requests

    @property
    def begun_requests(self) -> list[RequestRecord]:
        """The requests of `counted_requests` that the server began to answer: those answered, and those that were left
        unfinished.
        """
        return [
            request for request in self.counted_requests if request.answered or request.was_left
        ]


# Why a run with `precision` or `budget` ended. `precision`: the interval was narrow enough. `budget`: the time was used
# up. `blocks`: all blocks were measured. `num_prompts`: as many prompts as the user set were answered. `prompts`: all
# prompts of the set were answered.
StoppedBy = Literal["precision", "budget", "blocks", "num_prompts", "prompts"]


@dataclass(frozen=True)
class MeasuredRun:
    """Everything that a run has measured so far. Fields that were not measured yet contain their defaults.

    Attributes:
        arms: by name, `regular` and then `speculative`; an arm that is not measured is missing.
        prompt_rows: the rows of all answers so far.
        in_blocks: whether each arm is started anew for each batch or lap (`Engine.blocks`). All turns of a
            conversation are asked within one start.
        salted: whether every server's prefix cache respects salts; None if no arm has such a cache.
        end_tokens: the tokens with which the model ends a text; empty with random weights, whose texts mean nothing.
        quietness: watches the machine; None if the machine is not watched.
        stopped_by: why a run with `precision` or `budget` ended; None for any other run.
        confidence: level of the speed-up's intervals.
    """

    settings: PromptedSettings
    prompt_set: PromptSet
    arms: Mapping[str, MeasuredArm]
    prompt_rows: list[LatencyPromptRow] = field(default_factory=list)
    in_blocks: bool = False
    salted: bool | None = None
    end_tokens: Collection[int] = frozenset()
    quietness: Quietness | None = None
    stopped_by: StoppedBy | None = None
    confidence: float = CONFIDENCE

    def rows_of(self, arm: MeasuredArm) -> list[LatencyPromptRow]:
        return [row for row in self.prompt_rows if row.arm == arm.name]

    def pair(self, arm: MeasuredArm) -> tuple[MeasuredArm, MeasuredArm] | None:
        """The regular arm and the given arm; None if the given arm is regular, or if there is no regular arm."""
        if arm.name != "speculative" or "regular" not in self.arms:
            return None
        return self.arms["regular"], arm


@dataclass(frozen=True, kw_only=True)
class Group:
    """Figures of one arm that belong together. A figure that is not known is None."""

    @classmethod
    def measured(cls, run: MeasuredRun, arm: MeasuredArm) -> Group:
        """Compute the group's figures for one of the run's arms."""
        raise NotImplementedError


def figures_of(kind: type[Group], run: MeasuredRun, arm: MeasuredArm) -> dict[str, Any]:
    """Compute the figures of an arm for a kind of row that is composed of groups, by field; unknown figures are left
    out.
    """
    figures: dict[str, Any] = {}
    # The direct subclasses of `Group` among the ancestors of `kind`.
    groups = [base for base in kind.__mro__ if issubclass(base, Group) and Group in base.__bases__]
    for group in groups:
        for name, value in vars(group.measured(run, arm)).items():
            if value is not None:
                figures[name] = value
    return figures
