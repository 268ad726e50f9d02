"""Trees of draft tokens from a head, and predictors for heads that draft a block in one pass."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from harness.decoding.protocols import Proposal, Step, TreeDrafter
from harness.decoding.trees import TreeProposal
from harness.decoding.warp import AnyWarp
from harness.drafting.head_drafter import HeadDrafter, Unread
from harness.drafting.score_temperatures import ScoreTemperatures
from harness.drafting.text_branches import TextBranch, first_tokens
from harness.drafting.tree_growth import Draws, Grown, Growth, Predictor
from harness.drafting.tree_plan import TreePlan


class HeadTrees(HeadDrafter, TreeDrafter):
    """Proposes trees, for the drafter of a head. What is prepared are trees, and no chains.

    Attributes:
        plan: how the trees grow.
    """

    def __init__(self, head: Any, target: PreTrainedModel, warp: AnyWarp, plan: TreePlan) -> None:
        super().__init__(head, target, warp)
        self.plan = plan
        self._scores = ScoreTemperatures(plan.score_temperature)

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
        """Read the features, and predict the tokens of a tree of at most `depth` levels."""

    @torch.inference_mode()
    def propose(self, num_draft_tokens: int, uniforms: Tensor) -> Proposal:
        """See `Drafter.propose`."""
        return self._chain(num_draft_tokens, uniforms, None)

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
        depth = self.num_drafted(depth)
        growth = self.growth(depth)
        taken = first_tokens(branches, len(uniforms), self.device)
        temperatures = self._scores.of_rows(self.warp, self.device)
        draws = Draws(uniforms.to(self.device), *taken, temperatures)
        call = functools.partial(self.grow, growth, depth)
        grown = Grown(*self._run(call, depth, draws, self.prepared))
        self._scores.remember(grown)
        proposal = growth.trees(grown, branches)
        self._proposed = proposal.tokens
        probabilities = proposal.probabilities
        if probabilities is not None:
            probabilities = probabilities.to(self._home)
        certain = None if proposal.certain is None else proposal.certain.to(self._home)
        return TreeProposal(proposal.tokens.to(self._home), proposal.shape, probabilities, certain)

    def growth(self, depth: int) -> Growth:
        """Return how trees of so many levels grow, with the batch's warp."""
        return self.plan.growth(depth, self.warp, self.device)

    def grow(self, growth: Growth, depth: int, unread: Unread, *draws: Tensor) -> Grown:
        """Read the features and grow trees with `Draws`: a function of tensors, as `draft` is."""
        return growth.grow(self.predictor(unread, depth), Draws(*draws))

    def follow(self, path: Tensor) -> None:
        self._proposed = self._proposed.gather(1, (path - 1).to(self.device))

    def observe(self, num_accepted: Sequence[int], next_tokens: Sequence[int], step: Step) -> None:
        self._scores.observe(self._proposed, num_accepted, next_tokens)
        super().observe(num_accepted, next_tokens, step)

    def select(self, rows: Sequence[int]) -> None:
        self._scores.select(rows)
        super().select(rows)

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
        self._levels = logits.split(1, dim=1)
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
        after: from a level and tokens [B, n] to logits [B, n, V] of what follows them there.
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
