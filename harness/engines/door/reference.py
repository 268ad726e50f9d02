"""The target's own probabilities, which texts are checked against."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

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
