"""Trees of draft tokens from an EAGLE-3 head, each level in one pass over all of its nodes."""

from __future__ import annotations

import torch
from torch import Tensor

from harness.decoding.transfer import most, to_device
from harness.drafting.head_drafter import Unread
from harness.drafting.head_trees import HeadTrees
from harness.drafting.tree_growth import Predictor


class EagleTrees(HeadTrees):
    """Proposes trees, for a drafter with an EAGLE-3 head.

    Entries of nodes follow the decided ones in the head's cache, and are overwritten later.
    """

    def predictor(self, unread: Unread, depth: int) -> Predictor:
        return _EaglePredictor(self, self.read(unread))

    def logits_of(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits [B, n, V] after entries with these states [B, n, width], and the states that
        the entries of their children take.
        """
        normed = self.head.norm(states)
        logits = self.over_vocabulary(self._logits(normed))
        return logits, normed if self.head.config.norm_output else states

    def entries(
        self, tokens: Tensor, states: Tensor, num_before: int, level: int, visible: Tensor
    ) -> Tensor:
        """Append entries of nodes [B, n] to the cache -> their states.

        Args:
            states: [B, n, width], which the head reads beside the tokens.
            num_before: number of nodes that have entries already.
            level: the level of these nodes in the tree, from 1.
            visible: [B, n, num_before + n], whether each of these nodes sees each node up to now.
        """
        first_slots = to_device(self._num_cached, self.device)
        positions = (first_slots + level - 1).unsqueeze(1)
        self.cache.place_tree(
            positions.expand(-1, tokens.shape[1]),
            first_slots,
            largest_first=most(self._num_cached),
            num_before=num_before,
            visible=visible,
        )
        return self.head(self._embed(tokens), states, self.cache)


class _EaglePredictor(Predictor):
    """The levels of one iteration."""

    def __init__(self, drafter: EagleTrees, states: Tensor) -> None:
        self._drafter = drafter
        self._logits, self._states = drafter.logits_of(states)
        num_rows = len(states)
        self._visible = torch.empty(num_rows, 1, 0, dtype=torch.bool, device=states.device)
        self._level = 0

    def root(self) -> Tensor:
        return self._logits

    def expand(self, tokens: Tensor, parents: Tensor) -> Tensor:
        self._level += 1
        num_before = self._visible.shape[2]
        count = tokens.shape[1]
        rows = torch.arange(len(tokens), device=tokens.device).unsqueeze(1)
        itself = torch.eye(count, dtype=torch.bool, device=tokens.device)
        above = self._visible[rows, parents]
        visible = torch.cat([above, itself.expand(len(tokens), -1, -1)], dim=2)
        states = self._drafter.entries(
            tokens, self._states[rows, parents], num_before, self._level, visible
        )
        self._visible = visible
        logits, self._states = self._drafter.logits_of(states)
        return logits
