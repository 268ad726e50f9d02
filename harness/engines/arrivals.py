"""Arrivals, which a replay of an answer shows: tokens as they came, and where each comes from.

It imports nothing of ours. `local/decoding`, which imports nothing else of ours, says where its tokens come from.
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
    """Where each token comes from that an answer gained in one iteration; its end may cut off the last ones.

    Args:
        num_proposed: the draft tokens that were verified.
        num_accepted: how many of these were accepted.
        num_tokens: how many the answer gained.
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
        row: the place of the request among those that are answered.
        seconds: since the request began.
        tokens: new ones, at least one.
        origins: where each comes from; `target` where the arm does not know.
        proposed: the draft tokens that were verified for them; empty where that is not known.
        probabilities: the target's and the drafter's of the draft token that was rejected; None without one, and
            where they are not known.
    """

    row: int
    seconds: float
    tokens: Sequence[int]
    origins: Sequence[Origin]
    proposed: Sequence[int] = ()
    probabilities: tuple[float, float] | None = None
