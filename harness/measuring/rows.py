"""The row of `latency`, one per arm. It is composed of groups of figures (`figures`) and of settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from harness.measuring.figures.acceptance import AcceptanceFigures
from harness.measuring.figures.costs import CostFigures
from harness.measuring.figures.machine import QUIET, MachineFigures
from harness.measuring.figures.paired import SpeedupFigures
from harness.measuring.figures.requests import AnswerFigures, RequestFigures
from harness.measuring.figures.server import ServerFigures
from harness.measuring.figures.texts import EndFigures, TextFigures
from harness.results.row import pooled, setting
from harness.results.runs import num_covered
from harness.results.schema import (
    ComparedRow,
    MaybeInt,
    MaybeText,
    PromptedRow,
)
from harness.results.verdict import judged


@dataclass(frozen=True, kw_only=True)
class _LatencySettings(PromptedRow, ComparedRow):
    """Settings that only `latency` has."""

    repeats: MaybeInt = setting(
        "number of runs that were set; in a pooled row, number of runs that were pooled", "repeats"
    )
    repeat: int | Literal["all"] | None = setting(
        "number of the run among its repetitions; `all` for the pooled row",
        "repeat",
    )
    pooled_runs: list[str] | None = pooled(
        "none", "ids of the pooled runs; settings, such as `seed`, are those of the first of them"
    )


@dataclass(frozen=True, kw_only=True)
class LatencyRow(
    AnswerFigures,
    RequestFigures,
    ServerFigures,
    SpeedupFigures,
    MachineFigures,
    AcceptanceFigures,
    EndFigures,
    CostFigures,
    TextFigures,
    _LatencySettings,
):
    """`latency.csv`: one row per arm.

    The base classes are groups of columns. `results.row.Row` explains `kind` and `recognised_by`, and
    `results.schema.RunRow` explains `filled_if_measured`.
    """

    kind = "latency"
    filled_if_measured = ("ms_per_token",)
    recognised_by = ("arm", "ms_per_token", "speedup", "tokens_per_second")

    seed: MaybeInt = setting("seed of the random numbers", "seed")
    arm: MaybeText = pooled("same", "`regular` or `speculative`")

    @classmethod
    def as_judged(cls, rows: Sequence[LatencyRow]) -> Sequence[LatencyRow]:
        """The rows of one run; without a speed-up if the arms cannot be compared (`results.verdict.judged`)."""
        return judged(rows)

    @property
    def lacks_an_arm(self) -> bool:
        """Whether the speculative arm's row must follow this row. If it does not, the file was cut off."""
        return self.arm == "regular" and bool(self.draft)

    @property
    def was_starved(self) -> bool:
        """Whether other programs slowed this run. False for a server on another machine, and if this is not known."""
        share = self.processor_share
        return not self.is_on_another_machine and share is not None and share < QUIET

    @property
    def is_batched(self) -> bool:
        """Whether several prompts were decoded together, so that all rows of a batch have the same time."""
        return (self.batch_size or 1) > 1 and not self.was_served

    @property
    def ms_per_token_after_first(self) -> float | None:
        """Milliseconds per token after the first, over all answers.

        It is None if rows of a batch wait for each other, if tokens were held back (so that the first token's time is
        not known), or if answers have only one token. If the time of the first token or the length of answers is not
        recorded, it is `ms_per_token`. A pooled row keeps only the largest
        numbers of failed and of empty answers, so there it is inexact if these differ from run to run.
        """
        if self.ms_per_token is None or self.held_back or self.is_batched:
            return None
        num_answers = num_covered(self)
        first_ms = self.time_to_first_token_ms
        if not self.num_tokens or not num_answers or first_ms is None:
            return self.ms_per_token
        length = self.num_tokens / num_answers
        if length <= 1:
            return None
        return (self.ms_per_token * length - first_ms) / (length - 1)

    @property
    def was_quiet(self) -> bool:
        """Whether neither a drift nor other programs made the times unreliable, as far as this is known. Made-up times
        always count as reliable.
        """
        return self.is_simulated or not (self.drifted or self.was_starved)
