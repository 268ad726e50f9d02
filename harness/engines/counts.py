"""The counters of a server, and how much they grew while it answered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Literal


@dataclass(frozen=True)
class Counts:
    """Counters of a server, or how much they grew; None for one that the server lacks.

    Attributes:
        generated: new tokens.
        drafts: iterations that verified draft tokens.
        proposed, accepted: draft tokens.
        accepted_at: by position from 0, iterations in which the draft token there was accepted.
        preempted: requests that lost their place in the cache to others, and are read again.
        cached: tokens of prompts that were taken from a cache.
        first_tokens, first_token_s: requests that got their first token, and the sum of their times until then.
        restarts: number of restarts of the server. Each resets the counters, so that their growth is unknown.
        running: requests that are answered or wait at this moment: a state, which is never added up.
    """

    generated: float | None = None
    drafts: float | None = None
    proposed: float | None = None
    accepted: float | None = None
    accepted_at: Mapping[int, float] = field(default_factory=dict)
    preempted: float | None = None
    cached: float | None = None
    first_tokens: float | None = None
    first_token_s: float | None = None
    restarts: float = 0.0
    running: float | None = None

    @property
    def is_known(self) -> bool:
        """Whether any is known; restarts always are."""
        return replace(self, restarts=0.0) != Counts()


# Counters of one number each that may be missing.
_OPTIONAL = tuple(
    counter.name
    for counter in fields(Counts)
    if counter.name not in ("accepted_at", "restarts", "running")
)


def added(counts: Counts, other: Counts, sign: Literal[1, -1] = 1) -> Counts:
    """Return the sum of both, or with `sign=-1` the difference; `running` comes from the first.

    A counter that only one of them has is 0 in the other: servers show some only after the first event.
    """
    sums: dict[str, float] = {"restarts": counts.restarts + sign * other.restarts}
    for name in _OPTIONAL:
        first, second = getattr(counts, name), getattr(other, name)
        if first is not None or second is not None:
            sums[name] = (first or 0.0) + sign * (second or 0.0)
    accepted_at = dict(counts.accepted_at)
    for position, number in other.accepted_at.items():
        accepted_at[position] = accepted_at.get(position, 0.0) + sign * number
    return replace(counts, accepted_at=accepted_at, **sums)


def growth(now: Counts, before: Counts) -> Counts:
    """Return how much each counter grew; all are unknown if one fell, or if the server restarted."""
    grown = added(now, before, -1)
    numbers = [getattr(grown, name) or 0.0 for name in _OPTIONAL]
    has_fallen = min([*numbers, *grown.accepted_at.values()]) < 0
    return Counts(restarts=grown.restarts) if grown.restarts or has_fallen else grown
