"""Verification of trees: which path of draft tokens is kept, and the token that follows it.

Each rule is a pure function of a `TreeOffer`. On a tree without branches `verify_rounds` is
`verify.verify`, bit for bit, and `verify_traversal` is `rules.verify_block`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from harness.decoding.randomness import inverse_cdf

_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, slots=True)
class TreeOffer:
    """The input of a verification of trees: N >= 1 draft tokens for each of B rows.

    Attributes:
        logits: [B, N + 1, V] of the target, after the root and after each node.
        target_probabilities: the same, warped, float32.
        draft_tokens: [B, N], of nodes 1 to N.
        accept_uniforms: [B, N] in [0, 1), one for the test of each node.
        next_uniforms: [B, at least depth + 1] in [0, 1), one for each position the next token may
            have.
        offered: [B, N] bool, the nodes that count; the others are deeper than their row may go.
        parents, depths, ancestors, places: as in `trees.PlacedShape`.
        draft_probabilities: as in `trees.TreeProposal`.
    """

    logits: Tensor
    target_probabilities: Tensor
    draft_tokens: Tensor
    accept_uniforms: Tensor
    next_uniforms: Tensor
    offered: Tensor
    parents: Tensor
    depths: Tensor
    ancestors: Tensor
    places: Tensor
    draft_probabilities: Tensor | None = None

    def children_of(self, node: Tensor) -> Tensor:
        """Return which nodes [B, N] are offered children of a node [B] of their row."""
        return (self.parents == node.unsqueeze(1)) & self.offered


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


class _Remaining:
    """Holds what is left of the distributions after each node, while its children are tested.

    Attributes:
        target: [B, N + 1, V], after the root and after each node. Not normalised: the probabilities
            are target / target_mass.
        target_mass: [B, N + 1].
        draft, draft_mass: likewise, without the children that were rejected; draft is None where
            the trees are deterministic.
    """

    def __init__(self, offer: TreeOffer) -> None:
        draft = offer.draft_probabilities
        self._offer = offer
        self._rows = torch.arange(len(offer.parents), device=offer.parents.device)
        self.target = offer.target_probabilities.clone()
        self.target_mass = torch.ones_like(self.target[:, :, 0])
        self.draft = None if draft is None else draft.clone()
        self.draft_mass = self.target_mass.clone()

    def test(self, node: int) -> tuple[Tensor, Tensor]:
        """Return the probabilities [B] of a node's token after its parent, under the target and
        under the drafter: 1 where the trees are deterministic.
        """
        rows = self._rows
        parent = self._offer.parents[:, node - 1]
        token = self._offer.draft_tokens[:, node - 1]
        target = self.target[rows, parent, token] / self.target_mass[rows, parent]
        if self.draft is None:
            return target, torch.ones_like(target)
        return target, self.draft[rows, parent, token] / self.draft_mass[rows, parent]

    def reject(self, node: int, rejected: Tensor, scale: Tensor | None = None) -> Tensor:
        """Take a node's token out of what is left after its parent, where rejected [B] says so.

        Returns the mass [B] of max(0, scale target - draft), which is what remains of the target.
        A mass of zero means that the two agree up to rounding: the target then stays as it is.
        """
        rows = self._rows
        parent = self._offer.parents[:, node - 1]
        target = self.target[rows, parent]
        target_mass = self.target_mass[rows, parent]
        scaled = target / target_mass.unsqueeze(1)
        if scale is not None:
            scaled = scaled * scale.unsqueeze(1)
        residual = self._residual(node, scaled)
        mass = residual.sum(1)
        changes = rejected & (mass > 0)
        self.target[rows, parent] = torch.where(changes.unsqueeze(1), residual, target)
        self.target_mass[rows, parent] = torch.where(changes, mass, target_mass)
        self._remove_from_draft(node, rejected)
        return mass

    def _residual(self, node: int, target: Tensor) -> Tensor:
        """Return max(0, target - draft) [B, V] after a node's parent, for this target [B, V].

        A deterministic drafter gives the node all of its probability.
        """
        if self.draft is None:
            token = self._offer.draft_tokens[:, node - 1].unsqueeze(1)
            return target.scatter(1, token, 0.0)
        parent = self._offer.parents[:, node - 1]
        mass = self.draft_mass[self._rows, parent].unsqueeze(1)
        return (target - self.draft[self._rows, parent] / mass).clamp(min=0)

    def _remove_from_draft(self, node: int, rejected: Tensor) -> None:
        if self.draft is None:
            return
        rows = self._rows
        parent = self._offer.parents[:, node - 1]
        token = self._offer.draft_tokens[:, node - 1].unsqueeze(1)
        draft = self.draft[rows, parent]
        left = torch.where(rejected.unsqueeze(1), draft.scatter(1, token, 0.0), draft)
        left_mass = left.sum(1).clamp(min=_TINY)
        self.draft[rows, parent] = left
        self.draft_mass[rows, parent] = torch.where(
            rejected, left_mass, self.draft_mass[rows, parent]
        )


def verify_rounds(offer: TreeOffer) -> TreeVerdict:
    """Test the children of a node one after the other, and go on with the first that is accepted.

    Child x is accepted with probability min(1, target(x) / draft(x)). A rejection leaves
    normalise(max(0, target - draft)) of the target, and the draft without x, as it was drawn
    without replacement (SpecInfer, Miao et al. 2023, arXiv:2305.09781; Sequoia, Chen et al. 2024,
    arXiv:2402.12374). A deterministic tree has draft(x) = 1 for each child in turn, so greedy
    decoding follows the path of the target's own tokens.
    """
    rows = torch.arange(len(offer.parents), device=offer.parents.device)
    remaining = _Remaining(offer)
    last_node = torch.zeros_like(rows)
    # A node's number is above its parent's, and above those of the siblings tested before it.
    for node in range(1, offer.parents.shape[1] + 1):
        is_child = offer.children_of(last_node)[:, node - 1]
        target_probability, draft_probability = remaining.test(node)
        # A token that the drafter cannot draw any more fills the tree up, and is never accepted.
        is_tested = is_child & (draft_probability > 0)
        passes = offer.accept_uniforms[:, node - 1] * draft_probability < target_probability
        remaining.reject(node, is_tested & ~passes)
        last_node = torch.where(is_tested & passes, node, last_node)
    return _verdict(offer, last_node, remaining)


def verify_traversal(offer: TreeOffer) -> TreeVerdict:
    """Traversal verification, Weng et al. 2025 (arXiv:2505.12398): from the leaves to the root.

    The chance a that a node is reached by its path is passed down as in block verification: the
    root has a = 1, and a child x has min(1, a target(x) / draft(x)). A leaf is accepted with its a,
    and the whole path with it. A rejected child leaves normalise(max(0, a target - draft)) of its
    parent's target, the draft without x, and s / (s + 1 - a) of the parent's a, where s is the mass
    of that residual; the parent is then tested like a leaf when no child is left.
    """
    # What a child's rejection leaves of its parent depends on nothing below the child. So the nodes
    # can be rejected in the order of their numbers, and the first that passes be found afterwards.
    rows = torch.arange(len(offer.parents), device=offer.parents.device)
    remaining = _Remaining(offer)
    reach = torch.ones_like(remaining.target_mass)  # the a of the root and of each node
    # Whether a node and its ancestors are offered, and can be drawn. The root is.
    is_tested = nn.functional.pad(offer.offered, (1, 0), value=True)
    for node in range(1, offer.parents.shape[1] + 1):
        parent = offer.parents[:, node - 1]
        target_probability, draft_probability = remaining.test(node)
        tested = is_tested[rows, parent] & is_tested[:, node] & (draft_probability > 0)
        is_tested[:, node] = tested
        parent_reach = reach[rows, parent]
        ratio = target_probability / draft_probability.clamp(min=_TINY)
        reach[:, node] = (parent_reach * ratio).clamp(max=1)
        mass = remaining.reject(node, tested, scale=parent_reach)
        # A node that is reached for certain stays so, even where no mass is left.
        lowered = mass / (mass + 1 - parent_reach).clamp(min=_TINY)
        reach[rows, parent] = torch.where(tested & (parent_reach < 1), lowered, parent_reach)
    # The root passes always.
    passes = is_tested & (reach > nn.functional.pad(offer.accept_uniforms, (1, 0), value=-1.0))
    last_node = torch.where(passes, offer.places, offer.places.shape[1]).argmin(1)
    return _verdict(offer, last_node, remaining)


def _verdict(offer: TreeOffer, last_node: Tensor, remaining: _Remaining) -> TreeVerdict:
    """Keep the path to a node [B], and draw the next token from what is left after that node."""
    rows = torch.arange(len(last_node), device=last_node.device)
    depth = offer.depths[rows, last_node]
    weights = remaining.target[rows, last_node]
    next_token = inverse_cdf(weights, offer.next_uniforms[rows, depth])
    return TreeVerdict(last_node, depth, next_token)


def verify_eagle(offer: TreeOffer) -> TreeVerdict:
    """EAGLE's own sampling (`evaluate_posterior`, github.com/SafeAILab/EAGLE), for its trees of the
    likeliest tokens.

    It tests children as `verify_rounds` does for a deterministic tree, but draws the token after an
    accepted leaf from the target at temperature 1, without top-k and top-p: lossy at every other
    setting but greedy.
    """
    verdict = verify_rounds(offer)
    rows = torch.arange(len(verdict.last_node), device=verdict.last_node.device)
    has_children = offer.children_of(verdict.last_node).any(1)
    is_greedy = (offer.target_probabilities.amax(-1) == 1).all(1)
    plain = offer.logits[rows, verdict.last_node].float().softmax(-1)
    bonus = inverse_cdf(plain, offer.next_uniforms[rows, verdict.num_accepted])
    next_token = torch.where(has_children | is_greedy, verdict.next_token, bonus)
    return TreeVerdict(verdict.last_node, verdict.num_accepted, next_token)
