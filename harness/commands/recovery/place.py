"""The place of a text where many requests go on.

Most tokens of a text are nearly certain, and there a wrong verification draws what a correct one
draws. So a place is chosen where a proposal was rejected and much is open. It is chosen among the
texts of the first round, and all draws after it are in the second one, so that the choice does not
change the false-alarm rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from harness.commands.recovery.drawn import DrawnText


class _Place(NamedTuple):
    """The place before a text's token `end - 1`, and how open the token behind that is."""

    text: DrawnText
    end: int
    openness: float

    @property
    def token_ids(self) -> tuple[int, ...]:
        return (*self.text.request.prompt, *self.text.tokens[: self.end - 1])


def choose_place(texts: Sequence[DrawnText]) -> tuple[int, ...]:
    """The tokens after which the second token is most open.

    The first token after a place is the target's own, and a proposal is tested from the second one on.
    For example: after `Once upon a` a text goes on with `time`, which has 0.9; behind it a proposal
    was rejected, and the distribution there has an entropy of 2 nats. That makes 0.9 * 2.
    """
    places = []
    for text in texts:
        ends = range(1, len(text.tokens)) if text.rejected is None else text.rejected
        for end in ends:
            openness = float(text.widths[end - 1] * text.entropies[end])
            places.append(_Place(text, end, openness))
    if not places:
        return texts[0].request.prompt
    return max(places, key=lambda place: place.openness).token_ids
