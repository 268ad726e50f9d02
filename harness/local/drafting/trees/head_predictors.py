"""Predictors for heads that draft a block in one pass: expanding a node costs no pass."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from harness.local.drafting.trees.growth import Predictor


class MarginalPredictor(Predictor):
    """Predicts the same tokens after all nodes of a level, for a head that drafts every token
    without knowing the others.

    So a node's score is the product of its path's marginals, as in DDTree. Expanding a node costs
    no pass, so a dynamic tree finds every node that can be among the likeliest.

    Args:
        logits: [B, K, V], one for each of K levels.
    """

    # Of all nodes of a level, because that costs nothing.
    width = None

    def __init__(self, logits: Tensor) -> None:
        # K times [B, 1, V]: the same follows every node of a level.
        self._levels = logits.split(1, dim=1)
        self._level = 0

    def root(self) -> Tensor:
        return self._levels[0]

    def expand(self, tokens: Tensor, parents: Tensor) -> Tensor:
        self._level += 1
        return self._levels[self._level]


class TokenPredictor(Predictor):
    """Predicts the tokens after a node from its level and its own token, for a head that draws a
    block's tokens one after the other without another pass.

    Args:
        last: [B], the token before the tree, its root.
        after: turns a level (0 for the root's) and the tokens [B, n] of its nodes into the logits
            [B, n, V] of what follows them.
    """

    def __init__(self, last: Tensor, after: Callable[[int, Tensor], Tensor]) -> None:
        self._last = last.unsqueeze(1)
        self._after = after
        self._level = 0

    def root(self) -> Tensor:
        return self._after(0, self._last)

    def expand(self, tokens: Tensor, parents: Tensor) -> Tensor:
        self._level += 1
        return self._after(self._level, tokens)
