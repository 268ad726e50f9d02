"""Texts that exist already: what the target says of them, and how both models of a pair read them.

`local.engine.reference` and `local.engine.reading` compute these values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from harness.results.statistics import Floats
from harness.results.statistics.iterations import Cut


class Margin(NamedTuple):
    """How far apart the logits of two tokens are after a text.

    Attributes:
        value: the difference.
        tolerance: the largest difference that rounding explains there, as measured.
    """

    value: float
    tolerance: float


class KernelDeviations(NamedTuple):
    """How far logits along a text are from those of the eager model (as `engines.divergence.margin_deviation`
    measures it).

    Attributes:
        passes: deviation of the passes that decode the text.
        rounding: deviation of the eager model itself, after its embeddings were changed by one epsilon of their format.
    """

    passes: float
    rounding: float


class Reference(Protocol):
    """The target's view of given texts, computed from its weights or reported by a server."""

    @property
    def vocabulary_size(self) -> int:
        """V, the number of tokens in its vocabulary."""

    def logits_along(
        self, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]
    ) -> Floats:
        """Return the target's logits [B, n, V] before each token of each text, for n tokens of the longest one.

        The logits of a shorter text are undefined after its last token.
        """

    def draft_logits_along(
        self, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]
    ) -> Floats | None:
        """Return the same logits of a draft model that drafts token by token; None if there is no such draft."""

    def logits_by_another_route(self, prompt: Sequence[int], text: Sequence[int]) -> Floats | None:
        """Return the logits [n, V] before each token of one text, computed in another way, so that only rounding
        differs.

        None if there is no other way.
        """

    def kernel_deviations(
        self, prompt: Sequence[int], text: Sequence[int], logits: Floats
    ) -> KernelDeviations | None:
        """Return how far the logits [n, V] of `logits_along` are from the eager model's.

        None unless the passes that computed these logits are the passes that decode the checked texts.
        """

    def tolerance(self, likeliest: Floats, deviation: float) -> Floats:
        """Return the largest difference [n] between two logits that rounding explains.

        Args:
            likeliest: [n], the logit of the likeliest token at each position.
            deviation: `margin_deviation` between two ways to compute the logits.
        """

    def margin(self, token_ids: Sequence[int], wanted: int, other: int) -> Margin:
        """Return the logit of `wanted` after a text, minus the logit of `other`."""


# The most transcripts that are read together, and the most tokens that these have in all: a limit of memory.
TOGETHER = 8
_MOST_TOKENS = 16384

# Mistakes that an engine may make although it drafts with the right weights: hidden states come one position late; they
# come from other layers than the head was trained on (the layers before or after these, EAGLE-3's usual layers, the
# last layer); or a reduced vocabulary is read as if it were the target's.
DraftMistake = Literal[
    "late", "layers before", "layers behind", "usual layers", "last layer", "no mapping"
]


@dataclass(frozen=True)
class Transcript:
    """Tokens of an existing text, some of which the target is said to have written.

    Attributes:
        answers: the places of the answers in `token_ids`, in order. Each answers all tokens before it, and is not
            empty. Only after `Reading.until` does each have two tokens or more.
    """

    token_ids: Sequence[int]
    answers: Sequence[range]

    @classmethod
    def of(cls, prompt: Sequence[int], answer: Sequence[int]) -> Transcript:
        """Return the transcript of a prompt and its answer."""
        token_ids = [*prompt, *answer]
        return cls(token_ids, [range(len(prompt), len(token_ids))])

    @property
    def prompt(self) -> Sequence[int]:
        """The tokens before the first answer."""
        return self.token_ids[: self.answers[0].start]


def num_together(longest: int) -> int:
    """Return how many transcripts of this length are read together, at least one."""
    return max(1, min(TOGETHER, _MOST_TOKENS // longest))


@dataclass(frozen=True)
class ReadText:
    """What reading an answer of n tokens, at least two, gave.

    Attributes:
        cut: the answer cut into iterations, for every K.
        num_tokens: n.
        num_impossible: number of tokens that the target cannot draw.
        log_probability: the sum of the target's log-probabilities of the other tokens.
        expected, variance: mean and variance that this sum would have if the target drew each token.
        rounded: the cut after the logits were changed by as little as rounding; None if nothing is compared with the
            weights.
    """

    cut: Cut
    num_tokens: int
    num_impossible: int
    log_probability: float
    expected: float
    variance: float
    rounded: Cut | None = None
