"""Columns about acceptance that a server's answers give, by iterations, by a histogram or by totals, and its counters
where they give none.

A server counts the iterations that drafted something. Those that drafted nothing yielded a token each, so that all
iterations of an answer of n tokens, whose first comes with the prompt, are n - 1 less the accepted draft tokens: of 64
tokens with 16 accepted in 4 iterations that drafted, 47 iterations yielded 1.34 tokens each on average, and those that
drafted 5. From every source tokens per iteration are tokens that were decoded over iterations: accepted draft tokens
behind the end of an answer are none of its tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from harness.engines.counts import Counts, DraftCounts
from harness.engines.requests import RequestRecord
from harness.results.drafts import Drafts


def drafts_of(requests: Iterable[RequestRecord]) -> Drafts:
    """The draft tokens of these answers together."""
    return sum((request.counts for request in requests), Drafts())


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


def counted_acceptance(counts: Counts, requests: Sequence[RequestRecord]) -> Drafts:
    """The draft tokens that counters give; none where nothing was drafted.

    Args:
        requests: those that were counted.
    """
    drafted = counted_drafts(counts, requests, has_others=True)
    if drafted is None:
        return Drafts()
    generated = counts.generated
    if generated is None:
        generated = sum(request.num_tokens for request in requests)
    decoded = generated - len(requests)
    # Accepted tokens behind the end of an answer are no tokens of it, and there are no fewer iterations than drafts.
    are_whole = all(request.num_tokens == request.max_new_tokens for request in requests)
    is_known = drafted.iterations is not None or are_whole
    iterations = max(decoded - drafted.accepted, drafted.iterations or 0.0) if is_known else None
    # Other iterations than those that drafted may have drafted fewer.
    return replace(drafted.counts, decoded=decoded, iterations=iterations, k=math.nan)


def tokens_in_burst(requests: Sequence[RequestRecord]) -> float:
    """Tokens that arrive together after the first ones; 0 of answers that came at once."""
    num_bursts = sum(len(request.bursts) - 1 for request in requests)
    num_tokens = sum(request.num_tokens - 1 for request in requests)
    return num_tokens / num_bursts if num_bursts > 0 else 0.0


def longest_of(requests: Iterable[RequestRecord]) -> int | None:
    """The K of an engine, as it reports iterations or as totals show it; None where neither does."""
    return max((request.counts.longest for request in requests), default=0) or None
