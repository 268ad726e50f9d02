"""The arrivals of an answer, by which a replay shows it: tokens as they came, and the origin of each.

This module imports nothing of ours. `local/decoding`, which imports no other module of the instrument, uses it to say
where its tokens come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Origin(StrEnum):
    """Where a token comes from."""

    TARGET = "target"  # drawn from the target where no draft token was offered
    DRAFT = "draft"  # proposed by the drafter and accepted
    RECOVERED = "recovered"  # drawn from the residual after a rejection
    BONUS = "bonus"  # drawn from the target after all offered draft tokens were accepted


def origins(num_proposed: int, num_accepted: int, num_tokens: int) -> list[Origin]:
    """Return the origin of each token that an answer gained in one iteration.

    The end of an answer may cut off the last tokens of its iteration. With 3 proposed draft tokens, of which 1 is
    accepted, 2 tokens have the origins draft and recovered. If the answer ends after the first, it is draft alone.

    Args:
        num_proposed: number of draft tokens that were verified.
        num_accepted: number of these that were accepted.
        num_tokens: number of tokens that the answer gained.
    """
    last = Origin.BONUS
    if not num_proposed:
        last = Origin.TARGET
    elif num_accepted < num_proposed:
        last = Origin.RECOVERED
    return [*[Origin.DRAFT] * num_accepted, last][:num_tokens]


@dataclass(frozen=True, slots=True)
class Arrival:
    """Tokens of one answer that arrived together.

    Attributes:
        row: index of the request among the requests that are answered.
        seconds: time since the request began.
        tokens: the new token ids, at least one.
        origins: the origin of each token; `target` for all if the arm does not know.
        proposed: the draft tokens that were verified in the iteration; empty if they are not known.
        probabilities: the probabilities that the target and the drafter gave the rejected draft token; None if none was
            rejected, or if they are not known.
    """

    row: int
    seconds: float
    tokens: Sequence[int]
    origins: Sequence[Origin]
    proposed: Sequence[int] = ()
    probabilities: tuple[float, float] | None = None
