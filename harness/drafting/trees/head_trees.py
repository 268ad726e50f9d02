"""Trees of draft tokens from a head, and predictors for heads that draft a block in one pass.

The drafter of trees of each kind of head inherits from `HeadTrees` and from the kind's drafter of
chains. It adds only `predictor`, which reads the target's features and then predicts the tokens of
a tree, level by level. What the predictor must know of a node differs from kind to kind:

    EAGLE-3            the whole path to it: a pass for each level (in `kinds/eagle3`)
    DSpark, DFlash 2   its level and its own token: `TokenPredictor`
    the others         its level alone: `MarginalPredictor`
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from harness.decoding.protocols import Proposal, Step, TreeDrafter
from harness.decoding.trees import TreeProposal, tokens_on
from harness.decoding.warp import AnyWarp
from harness.drafting.heads.drafter import HeadDrafter
from harness.drafting.heads.unread import Unread
from harness.drafting.trees.growth import Grown, Growth, Predictor
from harness.drafting.trees.plan import TreePlan
from harness.drafting.trees.score_temperatures import ScoreTemperatures


class HeadTrees(HeadDrafter, TreeDrafter):
    """Proposes trees with a head of any kind.

    Attributes:
        plan: how the trees grow.
    """

    def __init__(self, head: Any, target: PreTrainedModel, warp: AnyWarp, plan: TreePlan) -> None:
        super().__init__(head, target, warp)
        self.plan = plan

    def start(
        self, prompts: Sequence[Sequence[int]], first_tokens: Sequence[int], step: Step
    ) -> None:
        self._scores = ScoreTemperatures(self.plan.score_temperature)
        super().start(prompts, first_tokens, step)

    def add(
        self, prompts: Sequence[Sequence[int]], first_tokens: Sequence[int], step: Step
    ) -> None:
        self._scores.add(len(prompts))
        super().add(prompts, first_tokens, step)

    @abstractmethod
    def predictor(self, unread: Unread, depth: int) -> Predictor:
        """Read the features, and return what predicts the tokens of a tree of at most `depth`
        levels.
        """

    @torch.inference_mode()
    def propose(self, num_draft_tokens: int, uniforms: Tensor) -> Proposal:
        """A chain, which is never prepared, because `prepared` has trees."""
        return self._chain(num_draft_tokens, uniforms, None)

    @torch.inference_mode()
    def propose_tree(self, depth: int, limits: Sequence[int], uniforms: Tensor) -> TreeProposal:
        depth = self.num_drafted(depth)
        growth = self.growth(depth)
        temperatures = self._scores.of_rows(self.warp, self.device)
        inputs = uniforms.to(self.device), temperatures
        call = functools.partial(self.grow, growth, depth)
        grown = Grown(*self._run(call, depth, inputs, self.prepared))
        self._scores.remember(grown)
        proposal = growth.trees(grown)
        self._proposed = proposal.tokens
        return proposal.to(self._home)

    def growth(self, depth: int) -> Growth:
        """Return how trees of so many levels grow, with the batch's warp as it is now."""
        return self.plan.growth(depth, self.warp, self.device)

    def grow(
        self, growth: Growth, depth: int, unread: Unread, uniforms: Tensor, temperatures: Tensor
    ) -> Grown:
        """Read the features and grow trees.

        Bound to a growth and a depth it is a function of tensors, as `HeadDrafter.draft` is, which
        `prepared_trees` compiles or captures.
        """
        return growth.grow(self.predictor(unread, depth), uniforms, temperatures)

    def follow(self, path: Tensor) -> None:
        self._proposed = tokens_on(path, self._proposed)

    def observe(self, num_accepted: Sequence[int], next_tokens: Sequence[int], step: Step) -> None:
        self._scores.observe(self._proposed, num_accepted, next_tokens)
        super().observe(num_accepted, next_tokens, step)

    def select(self, rows: Sequence[int]) -> None:
        self._scores.select(rows)
        super().select(rows)


class MarginalPredictor(Predictor):
    """Predicts the same tokens after all nodes of a level, for a head that drafts every token
    without knowing the others.

    So a node's score is the product of its path's marginals, as in DDTree. Expanding a node costs
    no pass, so a dynamic tree finds every node that can be among the likeliest.

    Args:
        logits: [B, K, V], one for each of K levels.
    """

    width = None

    def __init__(self, logits: Tensor) -> None:
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
