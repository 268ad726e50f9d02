"""Turns a server's counters into counts of draft tokens. (`figures.acceptance` chooses between these and the counts
that answers report.)

A server counts only those iterations in which something was drafted, except SGLang, which counts every verification;
how many of these drafted is then unknown. Every iteration yields one token in addition to the accepted draft tokens,
and the first token of an answer comes from the pass over the prompt. So an answer of n tokens, of which m are accepted
draft tokens, took n - 1 - m iterations.

For example, an answer has 64 tokens, of which 16 are accepted draft tokens, and the server counted 4 iterations that
drafted. The answer took 63 - 16 = 47 iterations, and each yielded 63 / 47 = 1.34 tokens on average. The 4 iterations
that drafted yielded 16 / 4 + 1 = 5 tokens each.

Whatever the source, tokens per iteration are decoded tokens divided by iterations. If draft tokens are accepted beyond
the end of an answer, they are not among its tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from harness.engines.counts import Counts, DraftCounts
from harness.engines.requests import RequestRecord
from harness.results.drafts import Drafts


def counted_drafts(
    counts: Counts, requests: Sequence[RequestRecord], has_others: bool = False
) -> DraftCounts | None:
    """The draft tokens that a server's counters report. None if nothing was drafted, or if the counters do not
    determine how many draft tokens were accepted.

    Args:
        requests: our requests that the counters include. The first token of each comes without a verification.
        has_others: whether the counters may also include requests of other clients. If so, the number of tokens is
            unknown, and the counts are not compared with it.

    Raises:
        ImpossibleCounts: if the counters contradict each other.
    """
    num_requests = len(requests)
    generated = counts.generated
    accepted = counts.accepted
    drafting = counts.drafts
    if accepted is None and counts.drafts and generated is not None:
        # SGLang counts every verification, also of nothing. Each yields one token in addition to the accepted ones.
        accepted = max(0.0, generated - num_requests - counts.drafts)
        drafting = None
    if accepted is None or not (counts.proposed or counts.drafts):
        return None
    # The draft positions from 0 to the last one of which the counters know anything.
    positions = range(1 + max(counts.accepted_at, default=-1))
    return DraftCounts(
        accepted=accepted,
        proposed=counts.proposed,
        drafting=drafting,
        accepted_at=[counts.accepted_at.get(position, 0.0) for position in positions],
        num_tokens=math.inf if has_others or generated is None else generated,
        num_answers=num_requests,
    )


def counted_acceptance(counts: Counts, requests: Sequence[RequestRecord]) -> Drafts:
    """The draft tokens that a server's counters report, as `Drafts`; empty (`Drafts()`) if `counted_drafts` is None.

    Args:
        requests: our requests that the counters include.

    Raises:
        ImpossibleCounts: if the counters contradict each other. (`figures.acceptance` checks this beforehand.)
    """
    # The counts are not compared with the number of tokens: `figures.server.impossible_counts` has done that if no
    # other client was counted.
    drafted = counted_drafts(counts, requests, has_others=True)
    if drafted is None:
        return Drafts()
    generated = counts.generated
    if generated is None:
        generated = sum(request.num_tokens for request in requests)
    decoded = generated - len(requests)
    # Tokens that were accepted beyond the end of an answer are not among its tokens. So the number of iterations is
    # computed only if no answer ended early, or if the counters report at least how many iterations drafted.
    are_whole = all(request.num_tokens == request.max_new_tokens for request in requests)
    is_known = counts.drafts is not None or are_whole
    iterations = max(decoded - drafted.accepted, counts.drafts or 0.0) if is_known else None
    # K is left unknown: answers may have been drafted with different K, so the mean does not show which positions were
    # drafted.
    return replace(drafted.as_drafts, decoded=decoded, iterations=iterations, k=math.nan)


def tokens_in_burst(requests: Sequence[RequestRecord]) -> float:
    """Mean number of tokens that arrive together (`RequestRecord.bursts`), without the first burst of each answer,
    which is assumed to have one token; 0 if no answer had a second burst.
    """
    spread = [request for request in requests if len(request.bursts) > 1]
    num_bursts = sum(len(request.bursts) - 1 for request in spread)
    num_tokens = sum(request.num_tokens - 1 for request in spread)
    return num_tokens / num_bursts if num_bursts > 0 else 0.0


def longest_of(requests: Iterable[RequestRecord]) -> int | None:
    """The K of an engine: the most tokens that an iteration of any answer drafted, as far as its counts show
    (`Drafts.longest`); None if not known.
    """
    return max((request.as_drafts.longest for request in requests), default=0) or None
