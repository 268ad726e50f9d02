"""Figures of acceptance: over all draft tokens, and for each draft position."""

from __future__ import annotations

from dataclasses import dataclass, replace

from harness.measuring.acceptance import counted_acceptance
from harness.measuring.figures.measured import Group, MeasuredArm, MeasuredRun
from harness.measuring.figures.server import impossible_counts, traffic_columns
from harness.results.drafts import DraftColumns, Drafts
from harness.results.row import pooled
from harness.results.schema import AcceptedByIteration, MaybeFloat, MaybeInt, MaybeText
from harness.results.verdict import MOST_FOREIGN


@dataclass(frozen=True, kw_only=True)
class AcceptanceFigures(Group, DraftColumns, AcceptedByIteration):
    """How many draft tokens were accepted, over all and for each position.

    The marginal rates also show the tokens per iteration that a smaller K would have yielded.
    """

    acceptance_source: MaybeText = pooled(
        "same", "`metrics` if acceptance was computed from the server's counters"
    )
    marginal_acceptance_by_position: list[float | None] | None = pooled(
        "mean",
        "accepted / iterations that drafted, at each draft position (marginal), as vLLM and llama.cpp print it",
    )
    num_decoded: MaybeInt = pooled(
        "sum", "tokens after the first of each answer, which iterations decided", "tokens"
    )
    mean_num_draft_tokens: MaybeFloat = pooled(
        "mean", "draft tokens per iteration, over all iterations: the K of `auto`", "tokens"
    )

    @classmethod
    def measured(cls, run: MeasuredRun, arm: MeasuredArm) -> Group:
        drafts, source = reported_drafts(run, arm)
        # Tested tokens that can be computed from other counts are stored, too.
        counts = replace(drafts, tested_at=drafts.tested).count_columns()
        impossible = impossible_counts(arm) if arm.was_sent else None
        return cls(
            acceptance_source=source, impossible_counts=impossible, **counts | drafts.columns()
        )


def reported_drafts(run: MeasuredRun, arm: MeasuredArm) -> tuple[Drafts, str | None]:
    """The draft tokens of an arm: from the server's counters if they say more than the answers, otherwise from the
    answers.

    The answers are used

    - if they say how many iterations drafted;
    - if they report draft tokens, and further requests kept up the load: counters include those requests;
    - if a count of the answers or of the counters is impossible;
    - if the counters missed tokens that arrived, or include too many tokens of other clients;
    - if they report anything, and the counters do not say how many iterations drafted (SGLang's);
    - if the counters report nothing.

    Returns:
        The counts, and their source: `metrics` for counters, None for answers.
    """
    reported = Drafts.total(row.drafts for row in run.rows_of(arm) if row.is_answered)
    # `drafting` is None if it is unknown, and 0 if nothing was drafted or no answer reports anything.
    keeps_up_load = any(lap.load is not None and lap.load.extra for lap in arm.generations)
    if reported.drafting or (keeps_up_load and reported.proposed):
        return reported, None
    if arm.counted is None or impossible_counts(arm):
        return reported, None
    traffic = traffic_columns(arm)
    own = sum(request.num_tokens + request.num_prompt_tokens for request in arm.answered)
    if traffic.get("unseen_tokens") or (traffic.get("foreign_tokens") or 0) > MOST_FOREIGN * own:
        return reported, None
    counted = counted_acceptance(arm.counted, arm.begun_requests)
    knows_more = counted.drafting is not None or not reported.answers
    return (counted, "metrics") if counted.answers and knows_more else (reported, None)
