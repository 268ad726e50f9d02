"""The target's own probabilities, which texts are checked against."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from harness.config.settings import DecodingSettings
from harness.results.statistics.arrays import Floats


class Margin(NamedTuple):
    """How far the logits of two tokens are apart after a text.

    Attributes:
        value: the difference.
        tolerance: the largest difference that rounding explains there, as measured.
    """

    value: float
    tolerance: float


class KernelDeviations(NamedTuple):
    """How far logits are from those of the eager model along a text, as `margin_deviation`.

    Attributes:
        passes: of the passes that decode.
        rounding: of the eager model with embeddings that are changed by the epsilon of their format.
    """

    passes: float
    rounding: float


class Reference(Protocol):
    """The target's own probabilities along given texts: from its weights, or as a server reports them."""

    @property
    def vocabulary_size(self) -> int:
        """V, the tokens that it knows."""

    def logits_along(
        self, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]
    ) -> Floats:
        """The target's logits [B, n, V] before each token of the longest text.

        A shorter text has undefined logits behind its last token.
        """

    def logits_by_another_route(self, prompt: Sequence[int], text: Sequence[int]) -> Floats | None:
        """The logits [n, V] before each token of one text by another route, which differ by what the
        reference cannot know: rounding. None where there is no such route.
        """

    def kernel_deviations(
        self, prompt: Sequence[int], text: Sequence[int], logits: Floats
    ) -> KernelDeviations | None:
        """How far the logits [n, V] of `logits_along` are from the eager model's; None unless these passes decode
        the texts that are checked.
        """

    def tolerance(self, likeliest: Floats, deviation: float) -> Floats:
        """The largest difference [n] of two logits that rounding explains.

        Args:
            likeliest: [n], the logits of the likeliest tokens.
            deviation: of margins between two routes (`margin_deviation`).
        """

    def first_proposals(
        self,
        prompts: Sequence[Sequence[int]],
        first_tokens: Sequence[int],
        decoding: DecodingSettings,
    ) -> tuple[Floats, Floats] | None:
        """Behind each prompt and its first token, the target's logits [B, V] and the distribution [B, V] of the first
        draft token; None where that is not known, and for a drafter that has none.
        """

    def margin(self, token_ids: Sequence[int], wanted: int, other: int) -> Margin:
        """The logit of `wanted` after a text, minus that of `other`."""
