"""Figures of acceptance: in all, by position, by request, the lengths that smaller K would have yielded, and whether an
engine that loads the weights itself accepts as much as these weights say.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from harness.measuring.figures.measured import Group, MeasuredArm, MeasuredRun
from harness.measuring.figures.server import traffic_columns
from harness.results.acceptance import Acceptance, mean_length_per_request
from harness.results.row import pooled, with_interval
from harness.results.schema import Accepted, MaybeFloat, MaybeText
from harness.results.statistics.interval import Interval

# Positions with an interval; a longer proposal has rates alone.
MOST_INTERVALS = 32


@dataclass(frozen=True, kw_only=True)
class AcceptanceFigures(Group, Accepted):
    """How much is accepted: in all, by position, by request, and what smaller K would have yielded."""

    acceptance_source: MaybeText = pooled(
        "same",
        "`metrics` where acceptance is that of the server's counters, or of its log, because its answers do not report"
        " it",
    )
    acceptance_by_position: list[float | None] | None = pooled(
        "mean", "accepted / tested at each draft position (conditional), as JSON"
    )
    marginal_acceptance_by_position: list[float | None] | None = pooled(
        "mean",
        "accepted / iterations at each draft position (marginal), as vLLM and llama.cpp print it, as JSON",
    )
    mean_acceptance_length_per_request: MaybeFloat = pooled(
        "mean",
        "mean over requests of their mean acceptance lengths; `mean_acceptance_length` pools iterations",
        "tokens",
    )
    acceptance_histogram: list[int] | None = pooled(
        "sum", "iterations with 0, 1, ... accepted draft tokens, as JSON"
    )
    tokens_per_iteration_by_num_draft_tokens: list[Interval] | None = with_interval(
        "mean",
        "expected tokens per iteration for K = 1, 2, ..., as JSON, exactly: from the chances of acceptance along the"
        " answers",
        ends="95 % intervals over prompts, as JSON",
        unit="tokens",
    )
    acceptance_length_by_num_draft_tokens: list[Interval] | None = with_interval(
        "mean",
        "mean acceptance length if iterations had proposed at most 1, 2, ... of their tokens, as JSON: about right, in"
        " place of `tokens_per_iteration_by_num_draft_tokens`; empty where not even that follows, as for blocks"
        " and servers",
        ends="95 % intervals over prompts, of `decoding.synthetic_acceptance` alone, as JSON",
        unit="tokens",
    )
    why_about: MaybeText = pooled(
        "same",
        "why `tokens_per_iteration_by_num_draft_tokens` is not known",
    )
    mean_proposed: MaybeFloat = pooled("mean", "draft tokens per iteration", "tokens")
    mean_num_draft_tokens: MaybeFloat = pooled(
        "mean", "the same over all iterations: K of `auto`", "tokens"
    )
    tokens_per_iteration: MaybeFloat = pooled(
        "mean", "tokens after the first of each answer / all iterations", "tokens"
    )

    @classmethod
    def measured(cls, run: MeasuredRun, arm: MeasuredArm) -> Group:
        # The fields of this group that follow from the counts of iterations, by name.
        columns = arm.acceptance.columns()
        are_known = True
        if arm.was_sent:
            from harness.measuring.acceptance import iterations_are_known

            are_known = iterations_are_known(arm.answered)
            columns = _reported(arm)
        lengths = None
        if (
            are_known
            and run.pair(arm) is not None
            and run.tokens_by_k is None
            and run.smaller_k_follow
        ):
            by_place: defaultdict[int, Acceptance] = defaultdict(Acceptance)
            for request in arm.answered:
                # Turns of a conversation are not independent, nor are repetitions of a prompt.
                place = run.prompt_set.occurrence(request.index).place
                by_place[place] += Acceptance.of(request.outcomes)
            of_coins = run.settings.decoding.synthetic_acceptance is not None
            lengths = lengths_by_num_draft_tokens(list(by_place.values()), of_coins=of_coins)
        by_request = [Acceptance.of(request.outcomes) for request in arm.answered if are_known]
        return cls(
            mean_acceptance_length_per_request=mean_length_per_request(by_request),
            tokens_per_iteration_by_num_draft_tokens=None
            if run.pair(arm) is None
            else run.tokens_by_k,
            acceptance_length_by_num_draft_tokens=lengths,
            why_about=None if lengths is None else run.why_about,
            **columns,
        )


def _reported(arm: MeasuredArm) -> dict[str, Any]:
    """Fields of `AcceptanceFigures` that a server reports without iterations: in its answers, else by its counters."""
    from harness.measuring.acceptance import acceptance_columns, counted_acceptance

    answered = arm.answered
    reported = acceptance_columns(answered)
    if arm.keeps_up_load and reported["acceptance_rate"] is not None:
        # Counters have the requests that only keep up the load, too.
        return reported
    if arm.counted is None or any(request.outcomes or request.histogram for request in answered):
        return reported
    requests = arm.counted_requests
    if traffic_columns(arm.counted, requests).get("unseen_tokens"):
        return reported
    begun = [request for request in requests if request.answered or request.is_cancelled]
    counted = counted_acceptance(arm.counted, begun)
    return counted | {name: value for name, value in reported.items() if value is not None}


def lengths_by_num_draft_tokens(
    prompts: Sequence[Acceptance], *, of_coins: bool = False
) -> list[Interval] | None:
    """The mean acceptance length for each smaller K; None where no draft token was tested, or one position never.

    They are about right, and so without intervals: iterations with a smaller K begin at other tokens. That is off by
    -11 to +33 % where hard tokens stand together, or apart.

    Args:
        prompts: the speculative arm's acceptance of each, over its turns and repetitions.
        of_coins: whether coins accepted the tokens, which fall alike for all of them, so that intervals hold.
    """
    from harness.results.statistics.ratios import skewed_ratio_of_totals

    drafted = [acceptance for acceptance in prompts if acceptance.num_iterations]
    num_iterations = [acceptance.num_iterations for acceptance in drafted]
    num_places = sum(drafted, Acceptance()).num_places
    lengths = []
    for k in range(1, min(num_places, MOST_INTERVALS) + 1):
        num_tokens = [acceptance.num_tokens_with(k) for acceptance in drafted]
        lengths.append(skewed_ratio_of_totals(num_tokens, num_iterations))
    if not lengths or not all(length.is_known for length in lengths):
        # After a gap, entries would be taken for those of another K: no list at all is better.
        return None
    if not of_coins:
        return [Interval(round(length.estimate, 4)) for length in lengths]
    return [
        Interval(round(length.estimate, 4), round(length.low, 4), round(length.high, 4))
        for length in lengths
    ]
