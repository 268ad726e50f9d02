"""A server's counts of its own work, and how much they grew while it answered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Literal


@dataclass(frozen=True)
class Counts:
    """Counters of a server, or how much they grew; None for what it does not count.

    Attributes:
        generated: new tokens.
        drafts: verifications of draft tokens.
        proposed, accepted: draft tokens.
        accepted_at: by position from 0, iterations in which the draft token there was accepted.
        preempted: requests that lost their place in the cache to others, and are read again.
        cached: tokens of prompts that were taken from a cache.
        first_tokens, first_token_s: requests that got their first token, and the sum of their times until then.
        restarts: how often the server has restarted. Growth over a restart is not known.
        running: requests that it answers now, or that wait. It does not grow.
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
        """Whether there is any counter."""
        return replace(self, restarts=0.0) != Counts()


_GROWING = tuple(
    field.name
    for field in fields(Counts)
    if field.name not in ("accepted_at", "restarts", "running")
)


def added(counts: Counts, other: Counts, sign: Literal[1, -1] = 1) -> Counts:
    """The sum of both, or with -1 the difference; what does not grow is as in the first.

    A counter that one of them lacks is 0 there: servers show some of them only after the first event.
    """
    sums: dict[str, float] = {"restarts": counts.restarts + sign * other.restarts}
    for name in _GROWING:
        first, second = getattr(counts, name), getattr(other, name)
        if first is not None or second is not None:
            sums[name] = (first or 0.0) + sign * (second or 0.0)
    accepted_at = dict(counts.accepted_at)
    for position, number in other.accepted_at.items():
        accepted_at[position] = accepted_at.get(position, 0.0) + sign * number
    return replace(counts, accepted_at=accepted_at, **sums)


def growth(now: Counts, before: Counts) -> Counts:
    """How much counters grew; all unknown where one fell, or the server was restarted."""
    grown = added(now, before, -1)
    numbers = [getattr(grown, name) or 0.0 for name in _GROWING]
    has_fallen = min([*numbers, *grown.accepted_at.values()]) < 0
    return Counts(restarts=grown.restarts) if grown.restarts or has_fallen else grown
