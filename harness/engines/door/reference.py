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
        tolerance: the largest difference that rounding explains there, as `rounding` measures it.
    """

    value: float
    tolerance: float


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
