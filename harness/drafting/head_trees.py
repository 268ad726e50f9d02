"""Trees of draft tokens from a head, and predictors for heads that draft a block in one pass."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from harness.decoding.kernels import without_plans
from harness.decoding.protocols import TreeDrafter
from harness.decoding.transfer import most
from harness.decoding.trees import TreeProposal
from harness.decoding.warp import AnyWarp
from harness.drafting.head_drafter import HeadDrafter, Unread
from harness.drafting.text_branches import TextBranch
from harness.drafting.tree_growth import Predictor, TreePlan


class HeadTrees(HeadDrafter, TreeDrafter):
    """Proposes trees, for the drafter of a head."""

    def __init__(self, head: Any, target: PreTrainedModel, warp: AnyWarp, plan: TreePlan) -> None:
        super().__init__(head, target, warp)
        self._plan = plan

    @abstractmethod
    def predictor(self, unread: Unread, depth: int) -> Predictor:
        """Read the features, and predict the tokens of a tree of at most `depth` levels."""

    @torch.inference_mode()
    def propose_tree(
        self,
        depth: int,
        limits: Sequence[int],
        uniforms: Tensor,
        branches: Sequence[TextBranch] = (),
    ) -> TreeProposal:
        """See `TreeDrafter.propose_tree`. The trees have the branches of the texts as well, see
        `text_branches`.
        """
        uniforms = uniforms.to(self.device)
        with without_plans():
            unread = self._unread()
            num_ahead = self.num_ahead(depth)
            self.cache.num_slots = most(self._num_cached) + unread.features.shape[1] + num_ahead
            predictor = self.predictor(unread, depth)
            self._count_as_read(self.num_reread)
            proposal = self._plan.propose(predictor, depth, self._warp, uniforms, branches)
        self._proposed = proposal.tokens
        probabilities = proposal.probabilities
        if probabilities is not None:
            probabilities = probabilities.to(self._home)
        certain = None if proposal.certain is None else proposal.certain.to(self._home)
        return TreeProposal(proposal.tokens.to(self._home), proposal.shape, probabilities, certain)

    def follow(self, path: Tensor) -> None:
        self._proposed = self._proposed.gather(1, (path - 1).to(self.device))

    def over_vocabulary(self, logits: Tensor) -> Tensor:
        """Spread logits [..., V of the head] over the target's tokens."""
        if self._tokens is None:
            return logits
        every_token = logits.new_full((*logits.shape[:-1], self.vocabulary_size), -torch.inf)
        return every_token.index_copy(-1, self._tokens, logits)


class MarginalPredictor(Predictor):
    """Predicts the tokens of a level alike after all nodes above it, as a head does that drafts
    every token without knowing the others.

    So a node counts by the product of its path's marginals, as in DDTree. Nothing is computed to
    expand a node: every node that can be among the likeliest is found.

    Args:
        logits: [B, K, V], for each of K levels.
    """

    width = None

    def __init__(self, logits: Tensor) -> None:
        self._levels = list(logits.split(1, dim=1))
        self.num_levels = len(self._levels)
        self._level = 0

    def root(self) -> Tensor:
        return self._levels[0]

    def expand(self, tokens: Tensor, parents: Tensor) -> Tensor:
        self._level += 1
        return self._levels[self._level]


class TokenPredictor(Predictor):
    """Predicts the tokens after a node from its level and its own token, as a head does that draws
    a block's tokens one after the other without another pass.

    Args:
        last: [B], the token before the tree.
        num_levels: that the head predicts.
        after: from a level and tokens [B, n] to logits [B, n, V] of what follows them there.
    """

    def __init__(
        self, last: Tensor, num_levels: int, after: Callable[[int, Tensor], Tensor]
    ) -> None:
        self._last = last.unsqueeze(1)
        self._after = after
        self._level = 0
        self.num_levels = num_levels

    def root(self) -> Tensor:
        return self._after(0, self._last)

    def expand(self, tokens: Tensor, parents: Tensor) -> Tensor:
        self._level += 1
        return self._after(self._level, tokens)
