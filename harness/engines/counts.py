"""Counts that a server reports: its counters, by how much they grew, and its counts of draft tokens."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from harness.results.drafts import Drafts

# A count with more draft tokens per iteration than this, all branches of a tree included, is refused. Without this
# limit, a hostile server could make this process allocate any amount of memory.
_MOST_DRAFTED = 1024
# The largest number of draft tokens that one iteration is assumed to accept, if the server does not report how many
# each iteration accepted.
MOST_ACCEPTED = 64


class ImpossibleCounts(ValueError):
    """Raised if counts contradict each other, or contradict the answers that they describe."""


@dataclass(frozen=True, kw_only=True)
class DraftCounts:
    """A server's count of draft tokens, in all iterations of one answer or of several answers.

    The reports of all servers, whatever their format, are turned into such a value. It cannot hold impossible counts.
    Counts that are not known are None or empty.

    Args:
        num_tokens: the number of tokens of the answers.
        num_answers: the number of answers. (Each answer may end within an iteration. Servers also count draft tokens
            that this iteration accepted after the end of the answer.)
        most_accepted: the largest number of draft tokens that one iteration can accept. It is used only if
            `accepted_at` and `steps` are both unknown.

    Attributes:
        proposed, accepted: the numbers of proposed and of accepted draft tokens.
        drafting: the number of iterations that drafted something.
        accepted_at: for each position, from 0, the number of iterations that accepted the draft token there.
        steps: (proposed, accepted) for each iteration in order. Iterations that drafted nothing may be among them.

    Raises:
        ImpossibleCounts: the counts contradict each other, or answers of this length cannot have such counts.
    """

    accepted: float
    proposed: float | None = None
    drafting: float | None = None
    accepted_at: Sequence[float] = ()
    steps: Sequence[tuple[int, int]] = ()
    num_tokens: float = math.inf
    num_answers: int = 1
    most_accepted: float = MOST_ACCEPTED

    def __post_init__(self) -> None:
        for proposed, accepted in [(self.proposed, self.accepted), *self.steps]:
            if proposed is not None and accepted > proposed:
                raise ImpossibleCounts(f"{accepted:.0f} accepted of {proposed:.0f} draft tokens")
        if self.steps:
            _require_equal("proposed", self.proposed, sum(proposed for proposed, _ in self.steps))
            _require_equal("accepted", self.accepted, sum(accepted for _, accepted in self.steps))
        if self.accepted_at:
            _require_equal("accepted", self.accepted, sum(self.accepted_at))
        by_steps = Counter(accepted for _, accepted in self.steps)
        num_left = len(self.steps)
        before = math.inf if self.drafting is None else self.drafting
        # If three iterations accepted 3, 1 and 0 tokens, `accepted_at` is [2, 1, 1].
        for position, number in enumerate(self.accepted_at):
            name = f"iterations that accepted draft token {position + 1}"
            if number > before:
                raise ImpossibleCounts(f"{number:.0f} {name}, of {before:.0f}")
            before = number
            num_left -= by_steps[position]
            if self.steps:
                _require_equal(name, number, num_left)
        self._check_length()

    def _check_length(self) -> None:
        """Raise ImpossibleCounts if the iterations must have yielded more tokens than the answers have, or if there are
        too many draft tokens for the number of iterations.
        """
        most_accepted = self.most_accepted
        if self.accepted_at:
            most_accepted = sum(number > 0 for number in self.accepted_at)
        elif self.steps:
            most_accepted = max(accepted for _, accepted in self.steps)
        # All draft tokens that the last iteration of an answer accepted may be after the end of the answer. So if two
        # iterations accepted 3 tokens each, and made 8 tokens, the answer has at least 5 of them.
        least = (self.drafting or 0) + self.accepted - most_accepted * self.num_answers
        if least > self.num_tokens:
            tokens = f"answers have {self.num_tokens:.0f}"
            raise ImpossibleCounts(f"drafts that make {least:.0f} tokens, and the {tokens}")
        iterations = self.drafting
        if iterations is None:
            iterations = self.num_tokens + self.num_answers
        if (self.proposed or 0) > _MOST_DRAFTED * iterations:
            of = f"{iterations:.0f} iterations"
            raise ImpossibleCounts(f"{self.proposed:.0f} draft tokens in {of}")

    @property
    def as_drafts(self) -> Drafts:
        """The totals (without `steps`) as a `Drafts` object, which can be added to the counts of other answers. The
        caller replaces its `decoded` and `iterations`.

        If nothing was drafted for an answer, it counts as an answer that reports no drafts.
        """
        # None means not counted; 0 and () mean that nothing was drafted. Totals do not contain `tested_at`.
        proposed, drafting = self.proposed, self.drafting
        return Drafts(
            answers=self.num_answers if proposed != 0 else 0,
            drafting=drafting if proposed != 0 else 0,
            proposed=proposed,
            accepted=self.accepted,
            accepted_at=self.accepted_at or (None if self.accepted else ()),
            tested_at=None if proposed != 0 else (),
            k=proposed / drafting if proposed and drafting else math.nan,
        )


def _require_equal(name: str, counted: float | None, total: float) -> None:
    if counted is not None and counted != total:
        raise ImpossibleCounts(f"{counted:.0f} {name} in all, and {total:.0f} by iteration")


@dataclass(frozen=True)
class Counts:
    """Counters of a server, or by how much they grew. A counter that the server does not have is None.

    Attributes:
        generated: the number of new tokens.
        drafts: the number of iterations that verified draft tokens.
        proposed, accepted: the numbers of proposed and of accepted draft tokens.
        accepted_at: for each position, from 0, the number of iterations that accepted the draft token there.
        read: the number of tokens of prompts. Some servers do not count tokens that came from a cache.
        cached: the number of tokens of prompts that came from a cache.
        first_tokens: the number of requests that received their first token.
        first_token_s: the sum of these requests' times until the first token, in seconds.
        restarts: the number of times that the server restarted. Each restart resets the counters, so that their growth
            is unknown.
        running: the number of requests that are being answered or are waiting now. This is a state and is never added
            up. In `Answered.counted`, it is the number of other clients' requests when this program gave up waiting
            for them before a question; 0 if it did not, since it connected to the server.
        words: for each field, the server's own name for the counter.
    """

    generated: float | None = None
    drafts: float | None = None
    proposed: float | None = None
    accepted: float | None = None
    accepted_at: Mapping[int, float] = field(default_factory=dict)
    read: float | None = None
    cached: float | None = None
    first_tokens: float | None = None
    first_token_s: float | None = None
    restarts: float = 0.0
    running: float | None = None
    words: Mapping[str, str] = field(default_factory=dict, compare=False)

    @property
    def is_known(self) -> bool:
        """Whether any counter except `restarts` and `running` is known."""
        return replace(self, restarts=0.0, running=None) != Counts()

    def in_words(self, *names: str) -> str:
        """Return the counters of these fields under the server's own names, for messages, such as
        `llamacpp:tokens_predicted_total 128`; "" if none is known.
        """
        known = [name for name in names if getattr(self, name) is not None and name in self.words]
        return ", ".join(f"{self.words[name]} {getattr(self, name):.0f}" for name in known)


# The fields that hold one number, and are None if the server does not have the counter.
_OPTIONAL = tuple(
    counter.name
    for counter in fields(Counts)
    if counter.name not in ("accepted_at", "restarts", "running", "words")
)


def added(counts: Counts, other: Counts, sign: Literal[1, -1] = 1) -> Counts:
    """Return the sum of both or, with `sign=-1`, the difference `counts` minus `other`. `running` and `words` are taken
    from `counts`.

    If only one of them has a counter, the counter is taken as 0 in the other, because servers show some counters only
    after the first event.
    """
    sums: dict[str, Any] = {"restarts": counts.restarts + sign * other.restarts}
    for name in _OPTIONAL:
        first, second = getattr(counts, name), getattr(other, name)
        if first is not None or second is not None:
            sums[name] = (first or 0.0) + sign * (second or 0.0)
    accepted_at = dict(counts.accepted_at)
    for position, number in other.accepted_at.items():
        accepted_at[position] = accepted_at.get(position, 0.0) + sign * number
    return replace(counts, accepted_at=accepted_at, **sums)


def growth(now: Counts, before: Counts) -> Counts:
    """Return by how much each counter grew. If a counter fell or the server restarted, all counters are unknown, except
    the number of restarts. `running` is that of `now`, or None if the counters are unknown.
    """
    grown = added(now, before, sign=-1)
    numbers = [getattr(grown, name) or 0.0 for name in _OPTIONAL]
    has_fallen = min([*numbers, *grown.accepted_at.values()]) < 0
    return Counts(restarts=grown.restarts) if grown.restarts or has_fallen else grown
