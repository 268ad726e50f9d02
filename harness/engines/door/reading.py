"""Texts that are there already, as both models of a pair read them (`local.engine.reading`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from harness.results.statistics.iterations import Cut

# The most transcripts with one prompt that are read together, and their most tokens.
TOGETHER = 8
_MOST_TOKENS = 16384

# How an engine may draft with the right weights and be wrong: hidden states that come one position late, or from other
# layers than the head was trained on (those before or behind, EAGLE-3's usual ones, the last), and a reduced vocabulary
# that is read as the target's.
DraftMistake = Literal[
    "late", "layers before", "layers behind", "usual layers", "last layer", "no mapping"
]


@dataclass(frozen=True)
class Transcript:
    """Tokens that are there already, some of which the target is said to have written.

    Attributes:
        answers: their places in `token_ids`, in order. Each has two tokens or more, and answers all that precedes it.
    """

    token_ids: Sequence[int]
    answers: Sequence[range]

    @classmethod
    def of(cls, prompt: Sequence[int], answer: Sequence[int]) -> Transcript:
        """One answer after its prompt."""
        token_ids = [*prompt, *answer]
        return cls(token_ids, [range(len(prompt), len(token_ids))])

    @property
    def prompt(self) -> Sequence[int]:
        """The tokens before the first answer."""
        return self.token_ids[: self.answers[0].start]


def num_together(longest: int) -> int:
    """The number of transcripts of this length that are read together."""
    return max(1, min(TOGETHER, _MOST_TOKENS // longest))


@dataclass(frozen=True)
class ReadText:
    """An answer of n tokens, two at least.

    Attributes:
        cut: into iterations, for every K.
        rounded: the same after a change that is as small as rounding; None where nothing is compared with the weights.
        num_tokens: n.
        num_impossible: tokens that the target cannot draw.
        log_probability: of the others under the target, summed.
        expected, variance: of that sum, if the target drew each token.
    """

    cut: Cut
    num_tokens: int
    num_impossible: int
    log_probability: float
    expected: float
    variance: float
    rounded: Cut | None = None
