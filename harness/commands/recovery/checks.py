"""The checks of a run: a class for each kind of result, which knows the columns of its row."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from harness.commands.recovery.drawn import TokenResult
from harness.commands.recovery.greedy import Finding, GreedyResult
from harness.commands.recovery.returned_logprobs import ReturnedResult
from harness.commands.recovery.rows import DrawnKind
from harness.results.acceptance import Acceptance

KindVerdict = Literal[
    "drafts", "some drafts", "none accepted", "no drafts", "ignored", "refused", "unknown"
]


@dataclass(frozen=True, kw_only=True)
class GreedyCheck:
    """Whether greedy texts are the likeliest tokens, or those of a regular server."""

    result: GreedyResult

    def columns(self) -> dict[str, Any]:
        return {"check": "greedy", "temperature": 0.0, **_greedy_columns(self.result)}


@dataclass(frozen=True, kw_only=True)
class DrawnCheck:
    """Whether drawn tokens follow the exact distribution, or that of a regular server.

    Attributes:
        sampling: the sampling setting of `setting` and `compared`.
        acceptance: of the draft tokens behind the draws: without rejections, much of the algorithm
            never ran.
        acceptance_rate: of servers that report it without iterations.
        num_draws_needed: a `num_draws` that would be enough, if this check cannot tell.
    """

    kind: DrawnKind
    result: TokenResult
    sampling: str | None = None
    acceptance: Acceptance = field(default_factory=Acceptance)
    acceptance_rate: float | None = None
    num_draws_needed: int | None = None

    def columns(self) -> dict[str, Any]:
        columns = {
            "check": self.kind,
            "sampling": self.sampling,
            "verdict": self.result.verdict,
            "acceptance": self.acceptance,
            "num_draws_needed": self.num_draws_needed,
            **_drawn_columns(self.result),
        }
        if self.acceptance_rate is not None:
            columns["acceptance_rate"] = self.acceptance_rate
        return columns


@dataclass(frozen=True, kw_only=True)
class ReferenceCheck:
    """Whether there is something to check answers against, which is undecided where there is not.

    Attributes:
        arm: the regular one, where its log-probabilities are the reference.
        finding: why nothing can be checked.
        greedy, drawn: the regular arm's own texts against its log-probabilities.
        p_value: the smallest of these.
    """

    verdict: Finding
    arm: str | None = None
    finding: str | None = None
    greedy: GreedyResult | None = None
    drawn: TokenResult | None = None
    p_value: float | None = None

    def columns(self) -> dict[str, Any]:
        columns: dict[str, Any] = {}
        if self.greedy is not None:
            columns |= _greedy_columns(self.greedy)
        if self.drawn is not None:
            columns |= _drawn_columns(self.drawn)
        columns |= {
            "check": "reference",
            "verdict": self.verdict,
            "finding": self.finding,
            "p_value": self.p_value,
        }
        if self.arm is not None:
            columns["arm"] = self.arm
        return columns


@dataclass(frozen=True, kw_only=True)
class LogprobsCheck:
    """Whether the log-probabilities that an arm returned with tokens are right."""

    arm: str
    result: ReturnedResult

    @property
    def is_wrong(self) -> bool:
        return self.result.verdict == "wrong"

    def columns(self) -> dict[str, Any]:
        return {
            "check": "logprobs",
            "arm": self.arm,
            "verdict": self.result.verdict,
            "num_tokens": self.result.num_tokens,
            "num_wrong": self.result.num_wrong,
            "finding": self.result.finding,
        }


@dataclass(frozen=True, kw_only=True)
class AnswersCheck:
    """Which recorded answers are judged, and which are left out and why."""

    finding: str
    num_prompts: int

    def columns(self) -> dict[str, Any]:
        return {"check": "answers", "finding": self.finding, "num_prompts": self.num_prompts}


@dataclass(frozen=True, kw_only=True)
class InterruptedCheck:
    """What a check had found when the run was interrupted: a loss, or nothing that decides."""

    check: GreedyCheck | DrawnCheck

    def columns(self) -> dict[str, Any]:
        columns = self.check.columns()
        if columns["verdict"] != "lossy":
            columns["verdict"] = "undecided"
        return columns


@dataclass(frozen=True, kw_only=True)
class KindCheck:
    """What a server did with one kind of request.

    Attributes:
        num_identical: texts equal to the regular arm's, of greedy requests; None without that arm.
    """

    kind: str
    verdict: KindVerdict
    finding: str
    acceptance: Acceptance = field(default_factory=Acceptance)
    acceptance_rate: float | None = None
    num_prompts: int | None = None
    num_tokens: int | None = None
    num_identical: int | None = None

    def columns(self) -> dict[str, Any]:
        columns: dict[str, Any] = {
            "check": "kind",
            "sampling": self.kind,
            "verdict": self.verdict,
            "finding": self.finding,
            "acceptance": self.acceptance,
            "num_prompts": self.num_prompts,
            "num_tokens": self.num_tokens,
            "identical_prompts": self.num_identical,
        }
        if self.acceptance_rate is not None:
            columns["acceptance_rate"] = self.acceptance_rate
        return columns


@dataclass(frozen=True, kw_only=True)
class RoundCheck:
    """A later round of the same questions.

    Attributes:
        number: of the round; the first one has the other checks.
        num_requests, elapsed_s: before it, since the run began to ask.
        together: drawn tokens of all rounds so far.
        usual_rate: acceptance of the same greedy questions in the first round, where it has fallen since.
    """

    number: int
    num_requests: int
    elapsed_s: float
    greedy: GreedyResult
    drawn: TokenResult | None
    together: TokenResult | None
    is_lossy: bool
    acceptance_rate: float | None
    usual_rate: float | None = None

    def columns(self) -> dict[str, Any]:
        columns = {} if self.drawn is None else _drawn_columns(self.drawn)
        columns |= _greedy_columns(self.greedy)
        columns |= {
            "check": "round",
            "round": self.number,
            "num_requests": self.num_requests,
            "elapsed_s": self.elapsed_s,
            "verdict": "lossy" if self.is_lossy else "lossless",
        }
        if self.together is not None:
            columns["visible_shift"] = self.together.visible
        if self.acceptance_rate is not None:
            columns["acceptance_rate"] = self.acceptance_rate
        if self.usual_rate is not None:
            columns["finding"] = f"acceptance was {self.usual_rate:.0%}"
        return columns


# A check that was finished, or interrupted. `columns` are those of its row, with `acceptance` as `Session.row` takes
# it.
Check = (
    GreedyCheck
    | DrawnCheck
    | ReferenceCheck
    | LogprobsCheck
    | KindCheck
    | RoundCheck
    | AnswersCheck
    | InterruptedCheck
)


def _greedy_columns(result: GreedyResult) -> dict[str, Any]:
    columns: dict[str, Any] = {
        "verdict": result.verdict,
        "num_prompts": result.num_prompts,
        "num_tokens": result.num_tokens,
        "num_cut_short": result.num_cut_short,
        "identical_prompts": result.num_identical,
    }
    worst = result.worst
    if worst is not None:
        columns["divergence_position"] = worst.position
        columns["logit_margin"] = worst.logit_margin
        columns["logit_tolerance"] = worst.logit_tolerance
    return columns


def _drawn_columns(result: TokenResult) -> dict[str, Any]:
    return {
        "num_draws": result.num_draws,
        "evidence": result.log_evidence / math.log(10),
        "num_draws_until": result.num_until,
        "p_value": result.p_value if result.num_draws else None,
        "significance_level": result.significance_level,
        "power": result.power,
        "visible_shift": result.visible,
        "rounding": result.rounding,
    }
