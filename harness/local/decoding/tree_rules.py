"""Verification of trees: which path of draft tokens is kept, and the token that follows it.

The rule is a pure function of a `TreeOffer`. On a tree without branches it is `verify.verify`, bit
for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.local.decoding.randomness import inverse_cdf


@dataclass(frozen=True, slots=True)
class TreeOffer:
    """The input of a verification of trees: N >= 1 draft tokens for each of B rows.

    Attributes:
        target_probabilities: [B, N + 1, V] float32, of the target after the root and after each node, warped.
        draft_tokens: [B, N], of nodes 1 to N.
        accept_uniforms: [B, N] in [0, 1), one for the test of each node.
        next_uniforms: [B, at least depth + 1] in [0, 1), one for each position the next token may
            have.
        offered: [B, N] bool, the nodes that count; the others are deeper than their row may go.
        parents, depths, ancestors: as in `trees.PlacedShape`.
    """

    target_probabilities: Tensor
    draft_tokens: Tensor
    accept_uniforms: Tensor
    next_uniforms: Tensor
    offered: Tensor
    parents: Tensor
    depths: Tensor
    ancestors: Tensor

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


def verify_rounds(offer: TreeOffer) -> TreeVerdict:
    """Test the children of a node one after the other, and go on with the first that is accepted.

    Child x is accepted with the target's probability of it, since a tree is a function of the text.
    A rejection leaves the target without x, normalised (SpecInfer, Miao et al. 2023,
    arXiv:2305.09781; Sequoia, Chen et al. 2024, arXiv:2402.12374). So greedy decoding follows the
    path of the target's own tokens.
    """
    rows = torch.arange(len(offer.parents), device=offer.parents.device)
    # What is left of the target after each node [B, N + 1, V], not normalised, and its mass.
    target = offer.target_probabilities.clone()
    mass = torch.ones_like(target[:, :, 0])
    last_node = torch.zeros_like(rows)
    # A node's number is above its parent's, and above those of the siblings tested before it.
    for node in range(1, offer.parents.shape[1] + 1):
        parent = offer.parents[:, node - 1]
        token = offer.draft_tokens[:, node - 1]
        is_tested = offer.children_of(last_node)[:, node - 1]
        probability = target[rows, parent, token] / mass[rows, parent]
        passes = offer.accept_uniforms[:, node - 1] < probability
        # Without any mass left the target's token was this one, up to rounding: it stays.
        left = target[rows, parent].scatter(1, token.unsqueeze(1), 0.0)
        left_mass = left.sum(1)
        changes = is_tested & ~passes & (left_mass > 0)
        target[rows, parent] = torch.where(changes.unsqueeze(1), left, target[rows, parent])
        mass[rows, parent] = torch.where(changes, left_mass, mass[rows, parent])
        last_node = torch.where(is_tested & passes, node, last_node)
    depth = offer.depths[rows, last_node]
    next_token = inverse_cdf(target[rows, last_node], offer.next_uniforms[rows, depth])
    return TreeVerdict(last_node, depth, next_token)
