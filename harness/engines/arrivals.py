"""The arrivals of an answer: which tokens came when, and from where each token comes. A replay shows them.

This module imports no other module of harness. It is the only module of the instrument that `local/decoding` imports:
the decoding loop states with it where its tokens come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Origin(StrEnum):
    """Where a token comes from."""

    TARGET = "target"  # drawn from the target after the prompt, or in an iteration that offered no draft token
    DRAFT = "draft"  # proposed by the drafter and accepted
    RECOVERED = "recovered"  # drawn in place of the first rejected draft token
    BONUS = "bonus"  # drawn from the target after all offered draft tokens were accepted


def origins(num_proposed: int, num_accepted: int, num_tokens: int) -> list[Origin]:
    """Return the origin of each token that an answer gained in one iteration.

    For example, if 3 draft tokens are proposed and 1 is accepted, the answer gains 2 tokens, with the origins draft and
    recovered. If the answer ends after the first of them, the result is draft only.

    Args:
        num_proposed: the number of draft tokens that were verified.
        num_accepted: how many of them were accepted.
        num_tokens: the number of tokens that the answer gained. It is smaller than num_accepted + 1 if the answer ended
            within the iteration.
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
        row: the index of the request among the requests that were sent together.
        seconds: the time since the request, or its batch, began.
        tokens: the new token ids, at least one.
        origins: the origin of each token; `target` for all tokens if the arm does not know their origins.
        proposed: the draft tokens that were verified in the iteration; empty if there were none, or if they are not
            known.
        probabilities: the probability of the first rejected draft token under the target, and its probability under
            the drafter. None if no token was rejected, if the answer ended before the token that replaces it, or if
            they are not known.
    """

    row: int
    seconds: float
    tokens: Sequence[int]
    origins: Sequence[Origin]
    proposed: Sequence[int] = ()
    probabilities: tuple[float, float] | None = None
