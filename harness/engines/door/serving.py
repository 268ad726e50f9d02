"""What `serve`, which speaks HTTP, gets of the loop that batches its requests (`local.serving`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

# Why a request is refused, or not answered any further, once the service ends.
ENDING = "the service is ending"


class Refusal(Exception):
    """A request that is not answered, or no further; the message is for the client.

    Attributes:
        status: of HTTP.
    """

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class TokenLogprob(NamedTuple):
    """A token of a text, and what the target expected in its place.

    Attributes:
        place: of the token among those that were asked about together.
        rank: 1 for the likeliest token.
        top: the likeliest tokens with their log-probabilities, the likeliest first.
    """

    place: int
    token: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]


@dataclass(frozen=True)
class ScoredToken:
    """A token of an answer's text with its log-probability.

    Attributes:
        offset: where the token's text begins, in characters of the answer.
    """

    offset: int
    logprob: TokenLogprob


@dataclass(frozen=True)
class Piece:
    """The text and tokens that an answer gained in one iteration.

    Attributes:
        choice: the answer's number among those of its request, from 0.
        finish_reason: `stop` or `length` in the last piece. `error` if the answer failed: the
            piece's text is then the reason.
        scored: one entry per token, where a request asks for log-probabilities.
    """

    choice: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    scored: Sequence[ScoredToken] = ()
