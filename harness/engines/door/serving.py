"""The values that the HTTP side of `serve` gets from the thread that answers requests (`local.serving`)."""

from __future__ import annotations

from dataclasses import dataclass

# The reason that is given to clients for requests that are refused or cut short because the service ends.
ENDING = "the service is ending"


class Refusal(Exception):
    """A request that is refused, or whose answer is cut short; the message is for the client.

    Attributes:
        status: the status code of HTTP.
    """

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True)
class Piece:
    """The text and tokens that an answer gained in one iteration.

    Attributes:
        choice: the answer's number among the answers to its request, from 0.
        finish_reason: in the last piece, `stop` or `length`, or `error` if the answer failed; the piece's text is then
            the reason. None in other pieces.
    """

    choice: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
