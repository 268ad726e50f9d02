"""Figures of costs: the parts of an iteration's time, and the predicted speed-up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from harness.measuring.figures.measured import Group, MeasuredArm, MeasuredRun
from harness.results.drafts import Drafts
from harness.results.row import pooled
from harness.results.schema import MaybeFloat


@dataclass(frozen=True, kw_only=True)
class CostFigures(Group):
    """The parts of an iteration's time, and the speed-up that theory predicts from the measured costs."""

    predicted_speedup: MaybeFloat = pooled(
        "mean",
        "tokens per iteration / (mean_num_draft_tokens c + v); c, v: times of a draft token and of verification, in"
        " regular steps",
        # The denominator is the time of drafting and verification, which is nearly `iteration_ms`.
        per="iteration_ms",
    )
    draft_ms: MaybeFloat = pooled("mean", "drafting per iteration", "ms", per="num_iterations")
    verify_ms: MaybeFloat = pooled(
        "mean",
        "verification per iteration: a pass over K + 1 tokens, and the verdict",
        "ms",
        per="num_iterations",
    )
    target_step_ms: MaybeFloat = pooled(
        "mean", "a pass of the target over one token, and the draw of the next", "ms"
    )
    iteration_ms: MaybeFloat = pooled("mean", "a whole iteration", "ms", per="num_iterations")
    host_share: MaybeFloat = pooled(
        "mean",
        "share of an iteration's or step's time that is spent outside of the models' calls",
    )

    @classmethod
    def measured(cls, run: MeasuredRun, arm: MeasuredArm) -> Group:
        # `forward` is the target's pass and the decision after it: a regular step, or a verification.
        forward_ms = arm.phases.ms_per_iteration("forward")
        columns: dict[str, Any] = {"host_share": _host_share(arm)}
        if arm.name == "regular":
            columns["target_step_ms"] = forward_ms
        else:
            columns["draft_ms"] = arm.phases.ms_per_iteration("drafting")
            columns["verify_ms"] = forward_ms
            columns["iteration_ms"] = _iteration_ms(arm)
        # Only a speculative arm that has a regular one to compare with makes a pair.
        pair = run.pair(arm)
        if pair is not None:
            columns["predicted_speedup"] = _prediction(run, *pair)
        return cls(**columns)


def _iteration_ms(arm: MeasuredArm) -> float | None:
    """The time after the prompts were read, in milliseconds per iteration (for the regular arm, per step). None if
    iterations are not known.
    """
    seconds = 0.0
    num_iterations = 0
    for answered in arm.generations:
        if answered.batch is not None:
            seconds += answered.seconds - answered.batch.first_s
            num_iterations += answered.batch.num_iterations
    return 1000 * seconds / num_iterations if num_iterations else None


def _host_share(arm: MeasuredArm) -> float | None:
    """The share of the time after the prompts were read that is spent outside of the models' calls; None if
    not known.
    """
    whole_ms = _iteration_ms(arm)
    forward_ms = arm.phases.ms_per_iteration("forward")
    if not whole_ms or forward_ms is None or not arm.phases.knows_host:
        return None
    # The regular arm drafts nothing.
    drafting_ms = arm.phases.ms_per_iteration("drafting") or 0.0
    # On a GPU, the phases are timed by another clock than the whole, so the share may come out slightly negative.
    return max(0.0, 1 - (forward_ms + drafting_ms) / whole_ms)


def _prediction(run: MeasuredRun, regular: MeasuredArm, speculative: MeasuredArm) -> float | None:
    """The speed-up that theory predicts from the times of the phases; None if one of these was not measured.

    It is tokens_per_iteration / (drafted c + v), with the mean number of drafted tokens, where c is the cost of
    drafting a token, and v the cost of verifying K + 1 tokens, both in regular steps. In theorem 3.8 of Leviathan et
    al. 2023, v is 1; here v is measured. The product of the drafted tokens and c is measured as one time: the phase
    `drafting`.
    """
    drafts = Drafts.total(row.drafts for row in run.rows_of(speculative))
    length = drafts.columns()["tokens_per_iteration"]
    step_ms = regular.phases.ms_per_iteration("forward")
    draft_ms = speculative.phases.ms_per_iteration("drafting")
    verify_ms = speculative.phases.ms_per_iteration("forward")
    if not (length and step_ms and draft_ms and verify_ms):
        return None
    return length * step_ms / (draft_ms + verify_ms)
