"""The values that the HTTP side of `serve` receives from the thread that answers requests (`local.serving`)."""

from __future__ import annotations

from dataclasses import dataclass

# The message to clients whose requests are refused or cut short because the service ends.
ENDING = "the service is ending"


class Refusal(Exception):
    """Raised if a request is refused, or if its answer is cut short. The message is for the client.

    Attributes:
        status: the HTTP status code.
    """

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True)
class Piece:
    """The text and tokens that an answer gained in one iteration.

    Attributes:
        choice: the index of the answer among the answers to its request, from 0.
        text: the new text.
        token_ids: the tokens of the iteration, including those after the end of the text.
        finish_reason: `stop` or `length` in the last piece, None in all others.
    """

    choice: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
