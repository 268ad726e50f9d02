"""Counts of draft tokens for an arm, from a server's answers or, if these report none, from its counters.

Answers report drafts by iteration, as a histogram or as totals. A server counts only the iterations that drafted
something. The others yielded one token each, and the first token of an answer comes with the prompt. So an answer of n
tokens took n - 1 iterations less the accepted draft tokens. For example, 64 tokens with 16 accepted in 4 iterations
that drafted took 63 - 16 = 47 iterations, which yielded 63 / 47 = 1.34 tokens each on average; those that drafted
yielded 16 / 4 + 1 = 5.

Whatever the source, tokens per iteration are decoded tokens over iterations. Draft tokens that were accepted beyond the
end of an answer are not among its tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from harness.engines.counts import Counts, DraftCounts
from harness.engines.requests import RequestRecord
from harness.results.drafts import Drafts


def drafts_of(requests: Iterable[RequestRecord]) -> Drafts:
    """The draft tokens of all these answers together."""
    return sum((request.counts for request in requests), Drafts())


def counted_drafts(
    counts: Counts, requests: Sequence[RequestRecord], has_others: bool = False
) -> DraftCounts | None:
    """The draft tokens by a server's counters; None if nothing was drafted, or the counters do not include drafts.

    Args:
        requests: the requests that the counters include. Their first tokens come without a verification.
        has_others: whether the counters include requests of other clients, too.

    Raises:
        ImpossibleCounts: if the counters contradict each other.
    """
    num_requests = len(requests)
    generated = counts.generated
    accepted = counts.accepted
    if accepted is None and counts.drafts and generated is not None:
        # Each verification yields one token besides the accepted ones.
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


def counted_acceptance(counts: Counts, requests: Sequence[RequestRecord]) -> Drafts:
    """The draft tokens by a server's counters; an empty `Drafts` if nothing was drafted.

    Args:
        requests: the requests that the counters include.
    """
    drafted = counted_drafts(counts, requests, has_others=True)
    if drafted is None:
        return Drafts()
    generated = counts.generated
    if generated is None:
        generated = sum(request.num_tokens for request in requests)
    decoded = generated - len(requests)
    # Accepted tokens beyond the end of an answer are not among its tokens, so the number of iterations is known only if
    # the counters have it, or no answer ended early. There are at least as many iterations as drafts.
    are_whole = all(request.num_tokens == request.max_new_tokens for request in requests)
    is_known = drafted.iterations is not None or are_whole
    iterations = max(decoded - drafted.accepted, drafted.iterations or 0.0) if is_known else None
    # The mean number of draft tokens may differ between answers, so it says nothing about positions.
    return replace(drafted.counts, decoded=decoded, iterations=iterations, k=math.nan)


def tokens_in_burst(requests: Sequence[RequestRecord]) -> float:
    """Mean number of tokens that arrive together, without the first of each answer; 0 if every answer came at once."""
    num_bursts = sum(len(request.bursts) - 1 for request in requests)
    num_tokens = sum(request.num_tokens - 1 for request in requests)
    return num_tokens / num_bursts if num_bursts > 0 else 0.0


def longest_of(requests: Iterable[RequestRecord]) -> int | None:
    """The K of an engine, as its iterations or its totals show it; None if neither does."""
    return max((request.counts.longest for request in requests), default=0) or None
