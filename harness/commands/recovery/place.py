"""The place of a text where many requests go on.

Most tokens of a text are nearly certain, and there a wrong verification draws what a correct one
draws. So a place is chosen where a recovered token has most to decide. It is chosen among the texts
of the first round, and all draws after it are in the second one, so that the choice does not change
the false-alarm rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from harness.commands.recovery.drawn import DrawnText
from harness.engines.door.reference import TextReference
from harness.engines.protocol import in_batches
from harness.results.statistics.arrays import Floats

# Places whose proposals are looked at.
_MOST_LOOKED_AT = 256


class _Place(NamedTuple):
    """The place before a text's token `end - 1`, and how open the token behind that is."""

    text: DrawnText
    end: int
    openness: float

    @property
    def token_ids(self) -> tuple[int, ...]:
        return (*self.text.request.prompt, *self.text.tokens[: self.end - 1])


def choose_place(
    texts: Sequence[DrawnText], reference: TextReference, num_together: int
) -> tuple[int, ...]:
    """The tokens after which a recovered token decides most.

    The first token after a place is the target's own, and a proposal is tested from the second one on.
    For example: after `Once upon a` a text goes on with `time`, which has 0.9; the draft's proposal
    behind it is rejected with 0.4; the residual distribution, from which the recovered token is then
    drawn, has an entropy of 1.2 nats. That makes 0.9 * 0.4 * 1.2. Where the draft's distribution is
    not known, a proposal counts as always rejected, and its residual is the target's distribution.

    Args:
        texts: of one sampling setting.
        num_together: the most texts that the reference has room for at once.
    """
    by_tokens: dict[tuple[int, ...], _Place] = {}
    for text in texts:
        ends = range(1, len(text.tokens)) if text.rejected is None else text.rejected
        for end in ends:
            openness = float(text.widths[end - 1] * text.entropies[end])
            place = _Place(text, end, openness)
            by_tokens.setdefault((*place.token_ids, text.tokens[end - 1]), place)
    if not by_tokens:
        return texts[0].request.prompt
    places = sorted(by_tokens.values(), key=lambda place: place.openness, reverse=True)
    decided: list[float] = []
    for batch in in_batches(places[:_MOST_LOOKED_AT], num_together):
        decided += _decided(batch, reference)
    return places[int(np.argmax(decided))].token_ids


def _decided(places: Sequence[_Place], reference: TextReference) -> list[float]:
    """How much the recovered token behind each place decides, in nats."""
    prompts = [place.token_ids for place in places]
    first_tokens = [place.text.tokens[place.end - 1] for place in places]
    sampling = places[0].text.request.sampling
    drafted = reference.draft_probabilities(prompts, first_tokens, sampling.decoding)
    if drafted is None:
        return [place.openness for place in places]
    # Before the first token, and behind it, before any other.
    logits = reference.logits_along(prompts, [[token, token] for token in first_tokens])
    decided = []
    for place, token, own_logits, drafts in zip(places, first_tokens, logits, drafted, strict=True):
        target: Floats = sampling.probabilities_along(own_logits, place.token_ids, [token, token])[
            1
        ]
        residual = np.clip(target - drafts, 0, None)
        rejected = float(residual.sum())
        known = residual[residual > 0] / rejected if rejected else residual[:0]
        entropy = float(-(known * np.log(known)).sum())
        decided.append(float(place.text.widths[place.end - 1]) * rejected * entropy)
    return decided
