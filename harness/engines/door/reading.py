"""Values that come from reading existing texts: with the target (`Reference`), and with both models of a pair
(`ReadText`).

`local.engine.reference` and `local.engine.reading` compute these values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from harness.results.statistics import Floats
from harness.results.statistics.iterations import Cut


class Margin(NamedTuple):
    """The difference between the logits of two tokens after a text.

    Attributes:
        value: the difference.
        tolerance: the largest difference that rounding explains after this text, as measured.
    """

    value: float
    tolerance: float


class KernelDeviations(NamedTuple):
    """How much logits along a text deviate from those of the eager model, as measured by
    `engines.divergence.margin_deviation`.

    Attributes:
        passes: the deviation of the passes that decode the text.
        rounding: for comparison, the deviation of the eager model itself if its embeddings are changed by about one
            epsilon of their dtype or less.
    """

    passes: float
    rounding: float


class Reference(Protocol):
    """The target's logits along given texts, computed from its weights or reported by a server."""

    @property
    def vocabulary_size(self) -> int:
        """V, the number of tokens in the target's vocabulary."""

    def logits_along(
        self, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]
    ) -> Floats:
        """Return the target's logits [B, n, V] before each token of each text, where n is the length of the longest
        text.

        For a shorter text, the logits after its last token are undefined.

        Raises:
            RunError: the logits of a text are not finite, or the server does not report log-probabilities.
        """

    def draft_logits_along(
        self, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]
    ) -> Floats | None:
        """Return the logits of the draft along the same texts, in the same form; None if the draft is not a model that
        drafts token by token, or if another engine drafts.
        """

    def logits_by_another_route(self, prompt: Sequence[int], text: Sequence[int]) -> Floats:
        """Return the logits [n, V] before each token of a text, computed in another way than by `logits_along`, so that
        only rounding differs. For a short text that is decoded alone, there may be no other way: then nothing differs.
        """

    def kernel_deviations(
        self, prompt: Sequence[int], text: Sequence[int], logits: Floats
    ) -> KernelDeviations | None:
        """Return how much the logits [n, V] of `logits_along` deviate from those of the eager model.

        None in three cases: if `logits_along` did not read with the width of the passes that decode, if the target's
        weights are in 8 bits, or if a server reported the logits.
        """

    def tolerance(self, likeliest: Floats, deviation: float) -> Floats:
        """Return, for each position, the largest difference [n] between two logits that rounding explains.

        Args:
            likeliest: [n], the logit of the likeliest token at each position.
            deviation: the `margin_deviation` between two ways of computing the logits.
        """


class WeightsReference(Reference, Protocol):
    """A reference computed from the weights, which can compare single tokens, too."""

    def margin(self, token_ids: Sequence[int], wanted: int, other: int) -> Margin:
        """Return the logit of `wanted` after a text minus the logit of `other`, and the tolerance for rounding.

        Args:
            token_ids: the prompt and the text, at least one token.

        Raises:
            RunError: as from `logits_along`.
        """


# At most this many transcripts are read together, and at most this many tokens in all of them, unless a single
# transcript has more. Both limits save memory.
TOGETHER = 8
_MOST_TOKENS = 16384

# Mistakes that an engine may make although it drafts with the right weights:
#   late             each hidden state is read one position late
#   layers before    hidden states come from the layers before those that the head was trained on
#   layers behind    ... from the layers after those
#   usual layers     ... from the default layers of EAGLE-3
#   last layer       ... from the last layer
#   no mapping       the tokens of a reduced vocabulary are taken for tokens of the target's vocabulary
DraftMistake = Literal[
    "late", "layers before", "layers behind", "usual layers", "last layer", "no mapping"
]


@dataclass(frozen=True)
class Transcript:
    """The tokens of an existing text, with the answers in it, which the target is said to have written.

    Attributes:
        token_ids: the tokens of the text.
        answers: for each answer, its indices in `token_ids`; at least one answer, in order. All tokens before an answer
            are its prompt. Each has at least one token; `local.engine.reading.PairReader` needs two, so its callers
            leave out shorter answers.
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
    """Return how many transcripts are read together if the longest of them has this many tokens, which must be
    positive. The result is at least 1.
    """
    return max(1, min(TOGETHER, _MOST_TOKENS // longest))


@dataclass(frozen=True)
class ReadText:
    """The results of reading an answer of n tokens, where n is at least 2.

    Attributes:
        cut: the answer divided into iterations, for every K: how many there are, and which draft tokens they accept.
        num_tokens: n.
        num_impossible: the number of tokens that the target cannot draw (probability 0).
        log_probability: the sum of the log-probabilities of the tokens that the target can draw.
        expected, variance: the mean and the variance that this sum would have if the target drew each of these tokens,
            after the same earlier tokens.
        rounded: `cut`, computed again after the embeddings were changed by as little as rounding; None if this was not
            done.
    """

    cut: Cut
    num_tokens: int
    num_impossible: int
    log_probability: float
    expected: float
    variance: float
    rounded: Cut | None = None
