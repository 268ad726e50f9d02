"""Figures of acceptance: in all, by position, and what smaller K would have yielded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from harness.measuring.figures.measured import Group, MeasuredArm, MeasuredRun
from harness.measuring.figures.server import impossible_counts, traffic_columns
from harness.results.row import Ratio, pooled
from harness.results.schema import Accepted, MaybeFloat, MaybeText


@dataclass(frozen=True, kw_only=True)
class AcceptanceFigures(Group, Accepted):
    """How much is accepted: in all, by position, and what smaller K would have yielded."""

    acceptance_source: MaybeText = pooled(
        "same", "`metrics` where acceptance is that of the server's counters"
    )
    acceptance_by_position: list[float | None] | None = pooled(
        Ratio(over="num_iterations"),
        "accepted / tested at each draft position (conditional)",
    )
    marginal_acceptance_by_position: list[float | None] | None = pooled(
        Ratio(over="num_iterations"),
        "accepted / iterations that drafted, at each draft position (marginal), as vLLM and llama.cpp print it",
    )
    acceptance_histogram: list[int] | None = pooled(
        "sum", "iterations with 0, 1, ... accepted draft tokens"
    )
    mean_proposed: MaybeFloat = pooled(
        Ratio(of="num_proposed"), "draft tokens per iteration that drafted", "tokens"
    )
    mean_num_draft_tokens: MaybeFloat = pooled(
        Ratio(over="num_iterations"), "the same over all iterations: K of `auto`", "tokens"
    )
    tokens_per_iteration: MaybeFloat = pooled(
        Ratio(of="num_tokens"), "tokens after the first of each answer / all iterations", "tokens"
    )

    @classmethod
    def measured(cls, run: MeasuredRun, arm: MeasuredArm) -> Group:
        return cls(**reported_acceptance(arm))


def reported_acceptance(arm: MeasuredArm) -> dict[str, Any]:
    """Fields of `AcceptanceFigures` by name: those of the answers, else of a server's counters."""
    from harness.measuring.acceptance import acceptance_columns, counted_acceptance

    answered = arm.answered
    reported = acceptance_columns(answered)
    if arm.keeps_up_load and reported["acceptance_rate"] is not None:
        # Counters have the requests that only keep up the load, too.
        return reported
    by_answers = any(
        request.outcomes or (request.drafts and request.drafts.iterations) for request in answered
    )
    if arm.counted is None or by_answers or impossible_counts(arm):
        return reported
    requests = arm.counted_requests
    if traffic_columns(arm.counted, requests).get("unseen_tokens"):
        return reported
    counted = counted_acceptance(arm.counted, arm.begun_requests)
    return counted | {name: value for name, value in reported.items() if value is not None}
