"""Whether an engine that loads the weights itself accepts as much as these weights say."""

from __future__ import annotations

from dataclasses import dataclass

from harness.commands.latency.figures.measured import Group, MeasuredArm, MeasuredRun
from harness.results.row import pooled, with_interval
from harness.results.schema import MaybeFloat, MaybeText
from harness.results.statistics.interval import Interval


@dataclass(frozen=True, kw_only=True)
class Health(Group):
    """The answers of the speculative arm, read once more with the weights of both models."""

    health: MaybeText = pooled(
        "same",
        "of `engine=vllm`: `as its weights say`, `broken`, `other texts` where its texts are not the model's, or"
        " `cannot tell`",
    )
    served_tokens_per_iteration: MaybeFloat = pooled(
        "mean", "of these answers, by the iterations that the engine reported", "tokens"
    )
    weights_tokens_per_iteration: Interval | None = with_interval(
        "mean",
        "that the weights expect of the same texts",
        "in which an engine with these weights is but for one run in a million",
        "tokens",
    )

    @classmethod
    def measured(cls, run: MeasuredRun, arm: MeasuredArm) -> Group:
        return cls() if run.health is None or run.pair(arm) is None else run.health
