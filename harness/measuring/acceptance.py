"""Columns about acceptance that a server's answers give, by iterations, by a histogram or by totals, and its counters
where they give none.

A server counts the iterations that drafted something. Those that drafted nothing yielded a token each, so that all
iterations of an answer of n tokens, whose first comes with the prompt, are n - 1 less the accepted draft tokens: of 64
tokens with 16 accepted in 4 iterations that drafted, 47 iterations yielded 1.34 tokens each on average, and those that
drafted 5. From every source tokens per iteration are tokens that were decoded over iterations: accepted draft tokens
behind the end of an answer are none of its tokens.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

from harness.engines.counts import Counts, DraftCounts
from harness.engines.requests import RequestRecord
from harness.results.acceptance import Acceptance


def iterations_are_known(requests: Iterable[RequestRecord]) -> bool:
    """Whether the `outcomes` of these answers are those of all their iterations.

    A histogram has how many tokens iterations accepted, and not how many they drafted. Their mean is what each drafted
    only where it is the same in all answers: of drafts of 8, 2 and 2 tokens the mean is 4 by chance.
    """
    mean_drafts: set[int] = set()
    for request in requests:
        if request.drafts is None:
            continue
        if request.drafts.proposed and not request.outcomes:
            return False
        if not request.drafts.steps:
            mean_drafts.update(proposed for proposed, _ in request.outcomes if proposed)
    return len(mean_drafts) <= 1


def acceptance_columns(requests: Sequence[RequestRecord]) -> dict[str, Any]:
    """The fields of `AcceptanceFigures` that these answers give, by name; None for what they do not report.

    An answer that reports nothing, among others that do, drafted nothing: llama.cpp leaves zeros out.
    """
    reported = [request for request in requests if request.outcomes or request.draft_tokens[0]]
    columns = Acceptance().columns()
    # Of an answer whose counts are impossible nothing is known, and so nothing of all of them.
    if not reported or any(request.impossible for request in requests):
        return columns
    num_drafted = sum(request.draft_tokens[0] for request in reported)
    if iterations_are_known(requests):
        columns = Acceptance.of(
            outcome for request in reported for outcome in request.outcomes
        ).columns()
    else:
        num_accepted = sum(request.draft_tokens[1] for request in reported)
        columns["acceptance_rate"] = num_accepted / num_drafted
        counted = [request.drafts for request in reported if request.drafts]
        num_drafting = [drafts.iterations or 0 for drafts in counted]
        if all(num_drafting):
            columns["mean_acceptance_length"] = 1 + num_accepted / sum(num_drafting)
            columns["mean_proposed"] = num_drafted / sum(num_drafting)
        histograms = [drafts.histogram for drafts in counted]
        if all(histograms):
            histogram = list(map(sum, itertools.zip_longest(*histograms, fillvalue=0)))
            columns["acceptance_histogram"] = histogram
    num_decoded = sum(max(0, request.num_tokens - 1) for request in requests)
    num_iterations = [request.num_iterations for request in requests]
    known_numbers = [number for number in num_iterations if number is not None]
    if len(known_numbers) < len(num_iterations):
        return columns
    return columns | _over_all_iterations(num_decoded, num_drafted, sum(known_numbers))


def counted_drafts(
    counts: Counts, requests: Sequence[RequestRecord], has_others: bool = False
) -> DraftCounts | None:
    """The draft tokens that counters give; None where nothing was drafted, or they do not have them.

    Args:
        requests: those that were counted. Their first tokens come without a verification.
        has_others: whether requests of other clients were counted, too.

    Raises:
        ImpossibleCounts: the counters contradict each other.
    """
    num_requests = len(requests)
    generated = counts.generated
    accepted = counts.accepted
    if accepted is None and counts.drafts and generated is not None:
        # Each verification yields one token besides those that it accepts.
        accepted = max(0.0, generated - num_requests - counts.drafts)
    if accepted is None or not (counts.proposed or counts.drafts):
        return None
    num_places = 1 + max(counts.accepted_at, default=-1)
    return DraftCounts(
        accepted=accepted,
        proposed=counts.proposed,
        iterations=counts.drafts,
        accepted_at=[counts.accepted_at.get(place, 0.0) for place in range(num_places)],
        num_tokens=math.inf if has_others or generated is None else generated,
        num_answers=num_requests,
    )


def counted_acceptance(counts: Counts, requests: Sequence[RequestRecord]) -> dict[str, Any]:
    """The columns about acceptance that counters give; none where nothing was drafted.

    Args:
        requests: those that were counted.
    """
    drafted = counted_drafts(counts, requests, has_others=True)
    if drafted is None:
        return {}
    accepted, proposed, drafts = drafted.accepted, drafted.proposed, drafted.iterations
    columns: dict[str, Any] = {"acceptance_source": "metrics"}
    if proposed:
        columns["acceptance_rate"] = accepted / proposed
    if drafts:
        columns["mean_acceptance_length"] = 1 + accepted / drafts
        columns["mean_proposed"] = proposed / drafts if proposed else None
        rates = [number / drafts for number in drafted.accepted_at]
        if rates:
            columns["marginal_acceptance_by_position"] = [round(rate, 4) for rate in rates]
    num_tokens = sum(request.num_tokens for request in requests)
    generated = num_tokens if counts.generated is None else counts.generated
    num_decoded = generated - len(requests)
    # Accepted tokens behind the end of an answer are no tokens of it, and there are no fewer iterations than drafts.
    are_whole = all(request.num_tokens == request.max_new_tokens for request in requests)
    if drafts is not None or are_whole:
        num_iterations = max(num_decoded - accepted, drafts or 0.0)
        columns |= _over_all_iterations(num_decoded, proposed, num_iterations)
    return columns


def _over_all_iterations(
    num_decoded: float, num_drafted: float | None, num_iterations: float
) -> dict[str, Any]:
    """The columns over all iterations, also those that drafted nothing.

    Args:
        num_decoded: tokens after the first of each answer.
    """
    if num_decoded <= 0 or num_iterations <= 0:
        return {}
    columns: dict[str, Any] = {"tokens_per_iteration": max(1.0, num_decoded / num_iterations)}
    if num_drafted:
        columns["mean_num_draft_tokens"] = num_drafted / num_iterations
    return columns


def tokens_in_burst(requests: Sequence[RequestRecord]) -> float:
    """Tokens that arrive together after the first ones; 0 of answers that came at once."""
    num_bursts = sum(len(request.bursts) - 1 for request in requests)
    num_tokens = sum(request.num_tokens - 1 for request in requests)
    return num_tokens / num_bursts if num_bursts > 0 else 0.0


def drafted_k(requests: Sequence[RequestRecord]) -> int | None:
    """The K of an engine, as it reports iterations or as totals show it; None where neither does."""
    reported = max((k for request in requests for k, _ in request.outcomes), default=None)
    means = [
        request.draft_tokens[0] / request.num_iterations
        for request in requests
        if request.num_iterations
    ]
    # Fewer are drafted where an answer ends.
    return reported or math.ceil(max(means, default=0)) or None
