"""Verification of trees: which path of draft tokens is kept, and the token that follows it.

Each rule is a pure function. On a tree without branches `verify_rounds` is `verify.verify`, bit for
bit, and `verify_traversal` is `rules.verify_block`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.decoding.randomness import inverse_cdf
from harness.decoding.trees import Parents, TreeShape

_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, slots=True)
class TreeOffer:
    """The input of a verification of trees: N >= 1 draft tokens for each of B rows.

    Attributes:
        logits: [B, N + 1, V] of the target, after the root and after each node.
        target_probabilities: the same, warped, float32.
        draft_tokens: [B, N].
        shape: of the trees.
        draft_probabilities: see `trees.TreeProposal`.
        accept_uniforms: [B, N] in [0, 1), one for the test of each node.
        next_uniforms: [B, depth + 1] in [0, 1), one for each position the next token may have.
        offered: [B, N], the nodes that count; the others are deeper than their row may go.
    """

    logits: Tensor
    target_probabilities: Tensor
    draft_tokens: Tensor
    shape: TreeShape
    draft_probabilities: Tensor | None
    accept_uniforms: Tensor
    next_uniforms: Tensor
    offered: Tensor

    def distributions_after(self, node: int) -> tuple[Tensor, Tensor | None]:
        """Return the target's distribution [B, V] after a node, and the draft's unless it is
        deterministic.
        """
        target = self.target_probabilities[:, node]
        if self.draft_probabilities is None:
            return target, None
        return target, self.draft_probabilities[:, node]

    def select(self, rows: list[int]) -> TreeOffer:
        """Return the offers of these rows."""
        draft = self.draft_probabilities
        return TreeOffer(
            self.logits[rows],
            self.target_probabilities[rows],
            self.draft_tokens[rows],
            self.shape.select(rows),
            None if draft is None else draft[rows],
            self.accept_uniforms[rows],
            self.next_uniforms[rows],
            self.offered[rows],
        )


@dataclass(frozen=True, slots=True)
class TreeVerdict:
    """Outcome of one verification.

    Attributes:
        last_node: [B] the last node of the path that is kept; 0 for none.
        num_accepted: [B] the length of that path.
        next_token: [B] the token after it.
    """

    last_node: Tensor
    num_accepted: Tensor
    next_token: Tensor


TreeRule = Callable[[TreeOffer], TreeVerdict]


@dataclass
class _Remaining:
    """The rest of the distributions after a node, for each of B rows, while its children are tested.

    Attributes:
        target: [B, V], not normalised: the probabilities are target / target_mass.
        draft: likewise, without the children that were tested; None for a deterministic drafter.
    """

    target: Tensor
    target_mass: Tensor
    draft: Tensor | None
    draft_mass: Tensor

    @classmethod
    def after(cls, target: Tensor, draft: Tensor | None) -> _Remaining:
        """Begin with the distributions [B, V] after a node."""
        ones = torch.ones_like(target[:, 0])
        return cls(target, ones, draft, ones)

    def test(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return probabilities [B] of tokens [B] under the target and under the drafter."""
        index = tokens.unsqueeze(1)
        target = self.target.gather(1, index).squeeze(1) / self.target_mass
        if self.draft is None:
            return target, torch.ones_like(target)
        return target, self.draft.gather(1, index).squeeze(1) / self.draft_mass

    def reject(self, tokens: Tensor, rejected: Tensor, scale: Tensor | None = None) -> Tensor:
        """Take tokens [B] out, in the rows that rejected them.

        Returns the mass [B] of max(0, scale target - draft), which is what remains of the target.
        A mass of zero means that the two agree up to rounding: the target then stays as it is.
        """
        target = self.target / self.target_mass.unsqueeze(1)
        if scale is not None:
            target = target * scale.unsqueeze(1)
        index = tokens.unsqueeze(1)
        if self.draft is None:
            residual = target.scatter(1, index, 0.0)
        else:
            residual = (target - self.draft / self.draft_mass.unsqueeze(1)).clamp(min=0)
        mass = residual.sum(1)
        changes = rejected & (mass > 0)
        self.target = torch.where(changes.unsqueeze(1), residual, self.target)
        self.target_mass = torch.where(changes, mass, self.target_mass)
        if self.draft is not None:
            left = self.draft.scatter(1, index, 0.0)
            self.draft = torch.where(rejected.unsqueeze(1), left, self.draft)
            left_mass = self.draft.sum(1).clamp(min=_TINY)
            self.draft_mass = torch.where(rejected, left_mass, self.draft_mass)
        return mass


def verify_rounds(offer: TreeOffer) -> TreeVerdict:
    """Test the children of a node one after the other, and go on with the first that is accepted.

    Child x is accepted with probability min(1, target(x) / draft(x)). A rejection leaves
    normalise(max(0, target - draft)) of the target, and the draft without x, as it was drawn without
    replacement (SpecInfer, Miao et al. 2023, arXiv:2305.09781; Sequoia, Chen et al. 2024,
    arXiv:2402.12374). A deterministic tree has draft(x) = 1 for each child in turn, so greedy
    decoding follows the path of the target's own tokens.
    """
    rows = torch.arange(len(offer.draft_tokens), device=offer.draft_tokens.device)
    parents = offer.shape.parents_on(rows.device)
    node = torch.zeros_like(rows)
    remaining = _Remaining.after(*offer.distributions_after(0))
    # A node comes after its parent and after its elder siblings.
    for number, tokens in enumerate(offer.draft_tokens.unbind(1), start=1):
        is_child = (parents[:, number - 1] == node) & offer.offered[:, number - 1]
        target_probability, draft_probability = remaining.test(tokens)
        # A token that the drafter cannot draw any more fills the tree up, and is never accepted.
        is_tested = is_child & (draft_probability > 0)
        passes = offer.accept_uniforms[:, number - 1] * draft_probability < target_probability
        accepted = is_tested & passes
        remaining.reject(tokens, is_tested & ~passes)
        new = _Remaining.after(*offer.distributions_after(number))
        remaining = _where(accepted, new, remaining)
        node = torch.where(accepted, number, node)
    depth = offer.shape.depths_on(rows.device)[rows, node]
    next_token = inverse_cdf(remaining.target, offer.next_uniforms[rows, depth])
    return TreeVerdict(node, depth, next_token)


def _where(condition: Tensor, new: _Remaining, old: _Remaining) -> _Remaining:
    column = condition.unsqueeze(1)
    draft = None
    if new.draft is not None and old.draft is not None:
        draft = torch.where(column, new.draft, old.draft)
    return _Remaining(
        torch.where(column, new.target, old.target),
        torch.where(condition, new.target_mass, old.target_mass),
        draft,
        torch.where(condition, new.draft_mass, old.draft_mass),
    )


def verify_traversal(offer: TreeOffer) -> TreeVerdict:
    """Traversal verification, Weng et al. 2025 (arXiv:2505.12398): from the leaves to the root.

    The chance that a node is reached by its path is passed down as in block verification: with a = 1
    at the root, a child x has min(1, a target(x) / draft(x)). A leaf is accepted with its a, and the
    whole path with it. A rejected child leaves normalise(max(0, a target - draft)) of its parent's
    target, the draft without x, and s / (s + 1 - a) of the parent's a, where s is the mass of that
    residual; the parent is then tested like a leaf when no child is left.
    """
    groups: dict[Parents, list[int]] = {}
    for row, parents in enumerate(offer.shape.parents):
        groups.setdefault(parents, []).append(row)
    if len(groups) == 1:
        return _Traversal(offer).verdict()
    verdicts: list[TreeVerdict] = []
    traversed: list[int] = []
    for rows in groups.values():
        verdicts.append(_Traversal(offer.select(rows)).verdict())
        traversed += rows
    order = torch.tensor(traversed).argsort().to(offer.draft_tokens.device)
    return TreeVerdict(
        torch.cat([verdict.last_node for verdict in verdicts])[order],
        torch.cat([verdict.num_accepted for verdict in verdicts])[order],
        torch.cat([verdict.next_token for verdict in verdicts])[order],
    )


class _Traversal:
    """The traversal of trees that have one shape."""

    def __init__(self, offer: TreeOffer) -> None:
        self._offer = offer
        self._rows = torch.arange(len(offer.draft_tokens), device=offer.draft_tokens.device)
        self._children: list[list[int]] = [[] for _ in range(offer.shape.num_nodes + 1)]
        for node, parent in enumerate(offer.shape.parents[0], start=1):
            self._children[parent].append(node)
        self._decided = torch.zeros_like(self._rows, dtype=torch.bool)
        self._last_node = torch.zeros_like(self._rows)
        self._weights = torch.zeros_like(offer.target_probabilities[:, 0])

    def verdict(self) -> TreeVerdict:
        """Traverse the trees."""
        every_row = torch.ones_like(self._decided)
        certain = torch.ones_like(self._weights[:, 0])
        self._visit(0, certain, every_row)
        depth = self._offer.shape.depths_on(self._rows.device)[self._rows, self._last_node]
        next_token = inverse_cdf(self._weights, self._offer.next_uniforms[self._rows, depth])
        return TreeVerdict(self._last_node, depth, next_token)

    def _visit(self, node: int, reach: Tensor, offered: Tensor) -> None:
        """Test the children of a node, then itself.

        Args:
            reach: [B] the a of the node.
            offered: [B] whether the node is offered to the row.
        """
        offer = self._offer
        remaining = _Remaining.after(*offer.distributions_after(node))
        for child in self._children[node]:
            tokens = offer.draft_tokens[:, child - 1]
            target_probability, draft_probability = remaining.test(tokens)
            is_tested = offered & offer.offered[:, child - 1] & (draft_probability > 0)
            ratio = target_probability / draft_probability.clamp(min=_TINY)
            self._visit(child, (reach * ratio).clamp(max=1), is_tested)
            mass = remaining.reject(tokens, is_tested, reach)
            # A root that is reached for certain stays so, even where no mass is left.
            lowered = mass / (mass + 1 - reach).clamp(min=_TINY)
            reach = torch.where(is_tested & (reach < 1), lowered, reach)
        passed = offered & ~self._decided
        if node:
            passed = passed & (offer.accept_uniforms[:, node - 1] < reach)
        self._last_node = torch.where(passed, node, self._last_node)
        self._weights = torch.where(passed.unsqueeze(1), remaining.target, self._weights)
        self._decided = self._decided | passed


def verify_eagle(offer: TreeOffer) -> TreeVerdict:
    """EAGLE's own sampling (`evaluate_posterior`, github.com/SafeAILab/EAGLE), for its trees of the
    likeliest tokens.

    It tests children as `verify_rounds` does for a deterministic tree, but draws the token after an
    accepted leaf from the target at temperature 1, without top-k and top-p: lossy at every other
    setting but greedy.
    """
    verdict = verify_rounds(offer)
    rows = torch.arange(len(verdict.last_node), device=verdict.last_node.device)
    parents = offer.shape.parents_on(rows.device)
    has_children = ((parents == verdict.last_node.unsqueeze(1)) & offer.offered).any(1)
    is_greedy = (offer.target_probabilities.amax(-1) == 1).all(1)
    plain = offer.logits[rows, verdict.last_node].float().softmax(-1)
    bonus = inverse_cdf(plain, offer.next_uniforms[rows, verdict.num_accepted])
    keeps = has_children | is_greedy
    next_token = torch.where(keeps, verdict.next_token, bonus)
    return TreeVerdict(verdict.last_node, verdict.num_accepted, next_token)
