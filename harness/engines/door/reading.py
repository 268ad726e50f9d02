"""Texts that are there already: what the target says of them, and how both models of a pair read them
(`local.engine.reference`, `local.engine.reading`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from harness.results.statistics import Floats
from harness.results.statistics.iterations import Cut


class Margin(NamedTuple):
    """How far the logits of two tokens are apart after a text.

    Attributes:
        value: the difference.
        tolerance: the largest difference that rounding explains there, as measured.
    """

    value: float
    tolerance: float


class KernelDeviations(NamedTuple):
    """How far logits are from the eager model's along a text (`engines.divergence.margin_deviation`).

    Attributes:
        passes: deviation of the passes that decode the text.
        rounding: deviation of the eager model after its embeddings were changed by one epsilon of their format.
    """

    passes: float
    rounding: float


class Reference(Protocol):
    """What the target says of given texts: computed from its weights, or reported by a server."""

    @property
    def vocabulary_size(self) -> int:
        """V, the tokens that it knows."""

    def logits_along(
        self, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]
    ) -> Floats:
        """The target's logits [B, n, V] before each token of the longest text.

        A shorter text has undefined logits after its last token.
        """

    def draft_logits_along(
        self, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]
    ) -> Floats | None:
        """The same of a draft model that drafts token by token; None without one."""

    def logits_by_another_route(self, prompt: Sequence[int], text: Sequence[int]) -> Floats | None:
        """The logits [n, V] before each token of one text, computed another way. They differ by rounding alone. None if
        there is no other way.
        """

    def kernel_deviations(
        self, prompt: Sequence[int], text: Sequence[int], logits: Floats
    ) -> KernelDeviations | None:
        """How far the logits [n, V] of `logits_along` are from the eager model's; None unless these passes decode
        the checked texts.
        """

    def tolerance(self, likeliest: Floats, deviation: float) -> Floats:
        """The largest difference [n] of two logits that rounding explains.

        Args:
            likeliest: [n], the logits of the likeliest tokens.
            deviation: `margin_deviation` between two ways to compute them.
        """

    def margin(self, token_ids: Sequence[int], wanted: int, other: int) -> Margin:
        """The logit of `wanted` after a text, minus that of `other`."""


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
