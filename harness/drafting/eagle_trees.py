"""Trees of draft tokens from an EAGLE-3 head, each level in one pass over all of its nodes."""

from __future__ import annotations

import torch
from torch import Tensor

from harness.drafting.head_drafter import Unread
from harness.drafting.head_trees import HeadTrees
from harness.drafting.tree_growth import Predictor
from harness.runners.regions import end_part


class EagleTrees(HeadTrees):
    """Proposes trees, for a drafter with an EAGLE-3 head.

    Entries of nodes follow the decided ones in the head's cache, and are overwritten later.
    """

    def num_ahead(self, num_draft_tokens: int) -> int:
        """See `HeadDrafter.num_ahead`: a chain's tokens, or all nodes above the last level."""
        num_expanded = self.plan.most_expanded(num_draft_tokens)
        return max(num_draft_tokens, (num_draft_tokens - 1) * num_expanded)

    def predictor(self, unread: Unread, depth: int) -> Predictor:
        return _EaglePredictor(self, self.read(unread), unread.starts + unread.counts)

    def logits_of(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits [B, n, V] after entries with these states [B, n, width], and the states
        that the entries of their children take.
        """
        normed = self.head.norm(states)
        logits = self.over_vocabulary(self._logits(normed))
        return logits, normed if self.head.config.norm_output else states

    def states_of(self, tokens: Tensor, states: Tensor) -> Tensor:
        """Append entries of nodes [B, n], which `cache` has placed -> their states.

        Args:
            states: [B, n, width], which the head reads beside the tokens.
        """
        return self.head(self._embed(tokens), states, self.cache)


class _EaglePredictor(Predictor):
    """The levels of one iteration.

    Every level but the first computes the same with other numbers, so that all share their compiled
    code.

    Args:
        states: [B, 1, width], of the last entry of the text.
        first_slots: [B], behind the text.
    """

    def __init__(self, drafter: EagleTrees, states: Tensor, first_slots: Tensor) -> None:
        self._drafter = drafter
        self._logits, self._states = drafter.logits_of(states)
        # The position of the next level, the slot of its first node, and the slots that are seen
        # from the nodes above it: the text's from the root.
        self._position = first_slots.unsqueeze(1)
        self._next_slot = first_slots.unsqueeze(1)
        slots = torch.arange(drafter.cache.num_slots, device=states.device)
        self._visible = (slots < self._position).unsqueeze(1)

    def root(self) -> Tensor:
        return self._logits

    def expand(self, tokens: Tensor, parents: Tensor) -> Tensor:
        count = tokens.shape[1]
        rows = torch.arange(len(tokens), device=tokens.device).unsqueeze(1)
        states = self._states[rows, parents]
        above = self._visible[rows, parents]
        end_part()
        slots = self._next_slot + torch.arange(count, device=tokens.device)
        self._visible = above.scatter(2, slots.unsqueeze(2), True)
        self._drafter.cache.place_tree(self._position, slots, self._visible)
        entries = self._drafter.states_of(tokens, states)
        self._position = self._position + 1
        self._next_slot = self._next_slot + count
        logits, self._states = self._drafter.logits_of(entries)
        return logits
