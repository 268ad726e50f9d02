"""What the HTTP side of `serve` gets from the thread that answers requests (`local.serving`)."""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True)
class Piece:
    """The text and tokens that an answer gained in one iteration.

    Attributes:
        choice: the answer's number among those of its request, from 0.
        finish_reason: `stop` or `length` in the last piece. `error` if the answer failed: the
            piece's text is then the reason.
    """

    choice: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
