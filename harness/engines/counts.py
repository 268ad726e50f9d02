"""What a server has counted of its own work, and how much that grew while it answered."""

from __future__ import annotations

# By these names, without those that it does not count:
#     generated: new tokens.
#     drafts: iterations that verified draft tokens.
#     proposed, accepted: draft tokens.
#     accepted at 0, accepted at 1, ...: iterations in which the draft token at this position was accepted.
#     preempted: requests that lost their place in the cache to others, and are read again.
#     cached: tokens of prompts that were taken from a cache.
#     first_tokens, first_token_s: requests that got their first token, and the sum of their times until then.
#     restarts: of the server. Growth over one is not known.
#     running: requests that it answers now, or that wait.
#     cache_size: tokens for which its cache has room.
Counts = dict[str, float]
_NOT_GROWING = ("running", "cache_size")


def added(counts: Counts, others: Counts, times: int = 1) -> Counts:
    """The sum of both, the others counted `times` times; what does not grow is as in the first."""
    total = dict(counts)
    for name, value in others.items():
        if name not in _NOT_GROWING:
            total[name] = total.get(name, 0.0) + times * value
    return total


def growth(now: Counts, before: Counts) -> Counts:
    """How much counters grew; none of them where one fell, or the server was restarted."""
    grown = added(now, before, -1)
    restarts = grown.pop("restarts", 0.0)
    if restarts or any(value < 0 for value in grown.values()):
        grown = {}
    return {**grown, "restarts": restarts}


def is_known(counts: Counts) -> bool:
    """Whether there is any counter."""
    return bool(counts.keys() - {"restarts"})
