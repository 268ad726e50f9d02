"""Verification of trees: which path of draft tokens is kept, and the token that follows it.

Each rule is a pure function. On a tree without branches `verify_rounds` is `verify.verify`, bit for
bit, and `verify_traversal` is `rules.verify_block`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from harness.decoding.randomness import inverse_cdf
from harness.decoding.trees import PlacedShape

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
        next_uniforms: [B, at least depth + 1] in [0, 1), one for each position the next token may
            have.
        offered: [B, N], the nodes that count; the others are deeper than their row may go.
        certain: see `trees.TreeProposal`.
    """

    logits: Tensor
    target_probabilities: Tensor
    draft_tokens: Tensor
    shape: PlacedShape
    draft_probabilities: Tensor | None
    accept_uniforms: Tensor
    next_uniforms: Tensor
    offered: Tensor
    certain: Tensor | None = None

    def is_certain(self, node: int) -> Tensor | None:
        """Return whether a node of each row [B] is certain; None where none is."""
        return None if self.certain is None else self.certain[:, node - 1]

    def distributions_after(self, node: int) -> tuple[Tensor, Tensor | None]:
        """Return the target's distribution [B, V] after a node, and the draft's unless it is
        deterministic.
        """
        target = self.target_probabilities[:, node]
        if self.draft_probabilities is None:
            return target, None
        return target, self.draft_probabilities[:, node]


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

    def test(self, tokens: Tensor, certain: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return probabilities [B] of tokens [B] under the target and under the drafter.

        Where a token is certain [B], the drafter's is 1.
        """
        index = tokens.unsqueeze(1)
        target = self.target.gather(1, index).squeeze(1) / self.target_mass
        if self.draft is None:
            return target, torch.ones_like(target)
        draft = self.draft.gather(1, index).squeeze(1) / self.draft_mass
        return target, draft if certain is None else draft.masked_fill(certain, 1.0)

    def reject(
        self,
        tokens: Tensor,
        rejected: Tensor,
        scale: Tensor | None = None,
        certain: Tensor | None = None,
    ) -> Tensor:
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
            if certain is not None:
                without = target.scatter(1, index, 0.0)
                residual = torch.where(certain.unsqueeze(1), without, residual)
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

    A child that is certain beside siblings that are drawn has draft(x) = 1 as well. Its rejection
    leaves normalise(target without x), and the draft without x. Its siblings were drawn from just
    that: which they are depends on the text alone, and never on the outcome of its test. So each
    round begins with a target that is left and a draft that is independent of it, and the rounds
    are those of drawn children.
    """
    rows = torch.arange(len(offer.draft_tokens), device=offer.draft_tokens.device)
    parents = offer.shape.parents
    node = torch.zeros_like(rows)
    remaining = _Remaining.after(*offer.distributions_after(0))
    # A node comes after its parent and after its elder siblings.
    for number, tokens in enumerate(offer.draft_tokens.unbind(1), start=1):
        is_child = (parents[:, number - 1] == node) & offer.offered[:, number - 1]
        certain = offer.is_certain(number)
        target_probability, draft_probability = remaining.test(tokens, certain)
        # A token that the drafter cannot draw any more fills the tree up, and is never accepted.
        is_tested = is_child & (draft_probability > 0)
        passes = offer.accept_uniforms[:, number - 1] * draft_probability < target_probability
        accepted = is_tested & passes
        remaining.reject(tokens, is_tested & ~passes, certain=certain)
        new = _Remaining.after(*offer.distributions_after(number))
        remaining = _where(accepted, new, remaining)
        node = torch.where(accepted, number, node)
    depth = offer.shape.depths[rows, node]
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
    # What a child's rejection leaves of its parent depends on nothing below the child. So all nodes
    # can be looked at in the order of their numbers, and the first that passes be found afterwards.
    rows = torch.arange(len(offer.draft_tokens), device=offer.draft_tokens.device)
    branches = _Branches(offer, rows)
    for number in range(1, offer.draft_tokens.shape[1] + 1):
        branches.test(number)
    passes = branches.is_tested & (branches.reach[:, 1:] > offer.accept_uniforms)
    ends_here = nn.functional.pad(passes, (1, 0), value=True)  # the root passes always
    places = offer.shape.places
    last_node = torch.where(ends_here, places, places.shape[1]).argmin(1)
    depth = offer.shape.depths[rows, last_node]
    weights = branches.target[rows, last_node]
    next_token = inverse_cdf(weights, offer.next_uniforms[rows, depth])
    return TreeVerdict(last_node, depth, next_token)


class _Branches:
    """What is left of the distributions after each node of B trees, while children are tested.

    Attributes:
        target: [B, N + 1, V], not normalised.
        reach: [B, N + 1], the a of the root and of each node.
        is_tested: [B, N], whether a node and its ancestors are offered, and can be drawn.
    """

    def __init__(self, offer: TreeOffer, rows: Tensor) -> None:
        draft = offer.draft_probabilities
        self._offer = offer
        self._rows = rows
        self.target = offer.target_probabilities.clone()
        self._draft = None if draft is None else draft.clone()
        self.reach = torch.ones_like(self.target[:, :, 0])
        self._target_mass = self.reach.clone()
        self._draft_mass = self.reach.clone()
        self.is_tested = offer.offered.clone()

    def test(self, number: int) -> None:
        """Compute how a node is reached, and reject it in what is left after its parent."""
        rows = self._rows
        tokens = self._offer.draft_tokens[:, number - 1]
        parent = self._offer.shape.parents[:, number - 1]
        remaining = self._after(parent)
        certain = self._offer.is_certain(number)
        target_probability, draft_probability = remaining.test(tokens, certain)
        above = (parent - 1).clamp(min=0)
        is_offered_above = (parent == 0) | self.is_tested[rows, above]
        is_tested = is_offered_above & self.is_tested[:, number - 1] & (draft_probability > 0)
        self.is_tested[:, number - 1] = is_tested
        reach = self.reach[rows, parent]
        ratio = target_probability / draft_probability.clamp(min=_TINY)
        self.reach[:, number] = (reach * ratio).clamp(max=1)
        mass = remaining.reject(tokens, is_tested, reach, certain)
        # A node that is reached for certain stays so, even where no mass is left.
        lowered = mass / (mass + 1 - reach).clamp(min=_TINY)
        self.reach[rows, parent] = torch.where(is_tested & (reach < 1), lowered, reach)
        self._replace(parent, remaining)

    def _after(self, node: Tensor) -> _Remaining:
        """Return what is left after a node [B] of each row."""
        rows = self._rows
        draft = None if self._draft is None else self._draft[rows, node]
        target_mass = self._target_mass[rows, node]
        return _Remaining(self.target[rows, node], target_mass, draft, self._draft_mass[rows, node])

    def _replace(self, node: Tensor, remaining: _Remaining) -> None:
        rows = self._rows
        self.target[rows, node] = remaining.target
        self._target_mass[rows, node] = remaining.target_mass
        self._draft_mass[rows, node] = remaining.draft_mass
        if self._draft is not None and remaining.draft is not None:
            self._draft[rows, node] = remaining.draft


def verify_eagle(offer: TreeOffer) -> TreeVerdict:
    """EAGLE's own sampling (`evaluate_posterior`, github.com/SafeAILab/EAGLE), for its trees of the
    likeliest tokens.

    It tests children as `verify_rounds` does for a deterministic tree, but draws the token after an
    accepted leaf from the target at temperature 1, without top-k and top-p: lossy at every other
    setting but greedy.
    """
    verdict = verify_rounds(offer)
    rows = torch.arange(len(verdict.last_node), device=verdict.last_node.device)
    has_children = ((offer.shape.parents == verdict.last_node.unsqueeze(1)) & offer.offered).any(1)
    is_greedy = (offer.target_probabilities.amax(-1) == 1).all(1)
    plain = offer.logits[rows, verdict.last_node].float().softmax(-1)
    bonus = inverse_cdf(plain, offer.next_uniforms[rows, verdict.num_accepted])
    keeps = has_children | is_greedy
    next_token = torch.where(keeps, verdict.next_token, bonus)
    return TreeVerdict(verdict.last_node, verdict.num_accepted, next_token)
