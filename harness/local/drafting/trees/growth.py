"""How trees of draft tokens grow, whatever predicts the tokens: as in EAGLE-2 (Li et al. 2024, arXiv:2406.16858).

A `Growth` asks a `Predictor`, which is a head, for logits after the text (the root), and then level
by level after the nodes that it expands: those that are likeliest to be reached. It keeps the
likeliest of all nodes that were looked at. `grow` computes with tensors alone, which a compiler or a
CUDA graph can take whole; `trees_of` then reads the shapes on the host. Nothing is drawn: the trees
follow from the texts alone.

Say a draft gives the tokens a, b and c 0.6, 0.3 and 0.1 after the text, and c 0.8 after a. With two
levels and a budget of three nodes a scores 0.6, its child c 0.6 * 0.8 = 0.48, and b 0.3: tokens
[a, b, c] with parents (0, 0, 1), where node 3 is the child of node 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from harness.local.decoding.trees import TreeProposal, TreeShape

# Where expanding a node costs a pass, a tree expands this many nodes of a level, and looks at as
# many children of each, as EAGLE-2 does.
WIDTH = 10


def most_expanded(budget: int) -> int:
    """Return the most nodes of a level that have children, in trees of at most `budget` nodes."""
    return min(WIDTH, budget)


class Predictor(Protocol):
    """Predicts the tokens after the nodes of B growing trees, level by level.

    It serves one proposal: `root` is called once, then `expand` once for each further level.

    Attributes:
        width: the most nodes of a level that a tree expands; None, where that costs nothing, for as
            many as can be among the likeliest.
    """

    width: int | None = WIDTH

    def root(self) -> Tensor:
        """Return logits [B, 1, V] after the text."""
        ...

    def expand(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """Return logits [B, n, V] after n nodes of the next level, or [B, 1, V] if the same follows
        each of them.

        Args:
            tokens: [B, n] of these nodes.
            parents: [B, n], the places of their parents, from 0, among the nodes of the last call;
                all 0 after `root`.
        """
        ...


class Grown(NamedTuple):
    """Trees of N nodes as tensors, before the host has read their shapes.

    Attributes:
        tokens: [B, N].
        scores: [B, N], logarithms.
        parents: [B, N], as in a `TreeShape`.
    """

    tokens: Tensor
    scores: Tensor
    parents: Tensor


class _Level(NamedTuple):
    """The n nodes of one level that a tree looked at, and those that it expanded.

    Attributes:
        tokens, scores: [B, n]; the scores are logarithms.
        expanded: [B, width], the places of the expanded ones, from 0; None in the last level.
    """

    tokens: Tensor
    scores: Tensor
    expanded: Tensor | None = None


@dataclass(frozen=True)
class Growth:
    """Grows a tree in each row.

    A node's score is the product of the predicted probabilities on its path, at temperature 1 as
    EAGLE-2 has it, so a parent scores no less than its children.

    Attributes:
        depth: the most levels.
        budget: the most nodes.
    """

    depth: int
    budget: int

    def grow(self, predictor: Predictor) -> Grown:
        """Grow trees.

        Which operations run never depends on the values of a tensor, and none of them waits for the
        device.
        """
        logits = predictor.root()
        width = min(predictor.width or self.budget, self.budget, logits.shape[-1])
        # Scores of the nodes that the logits follow: at first the root's, the logarithm of 1.
        above = logits.new_zeros(len(logits), 1, dtype=torch.float32)
        levels: list[_Level] = []
        while len(levels) + 1 < self.depth:
            level = _children(logits, above, width)
            expanded = level.scores.topk(width, dim=1).indices
            levels.append(level._replace(expanded=expanded))
            above = level.scores.gather(1, expanded)
            # The children of node i are at places i * width to (i + 1) * width - 1.
            logits = predictor.expand(level.tokens.gather(1, expanded), expanded // width)
        levels.append(_children(logits, above, width))
        return self._likeliest(levels, width)

    def _likeliest(self, levels: Sequence[_Level], width: int) -> Grown:
        """Return the trees of the nodes that score best, of all that were looked at.

        Those are numbered from 1, level by level; the ones that are kept get new numbers, in the
        same order.
        """
        tokens = torch.cat([level.tokens for level in levels], dim=1)
        scores = torch.cat([level.scores for level in levels], dim=1)
        parents = [torch.zeros_like(levels[0].tokens)]
        num_above = 0
        for level in levels[:-1]:
            assert level.expanded is not None
            numbers = level.expanded + 1 + num_above
            parents.append(numbers.repeat_interleave(width, dim=1))
            num_above += level.tokens.shape[1]
        # Stable: a parent comes before a child that scores the same.
        order = scores.sort(dim=1, descending=True, stable=True).indices
        kept = order[:, : self.budget].sort(dim=1).values
        old_parents = torch.cat(parents, dim=1).gather(1, kept)
        # A parent scores no less than its child, so it is kept too: nodes 2, 5 and 6 become 1, 2,
        # 3.
        new_parents = torch.searchsorted(kept + 1, old_parents) + 1
        return Grown(
            tokens.gather(1, kept),
            scores.gather(1, kept),
            torch.where(old_parents == 0, 0, new_parents),
        )


def _children(logits: Tensor, above: Tensor, width: int) -> _Level:
    """Return the `width` likeliest children of each of n nodes that score `above` [B, n]."""
    children = logits.float().log_softmax(-1).topk(width, dim=-1)
    tokens = children.indices.expand(-1, above.shape[1], -1).flatten(1)
    scores = (above.unsqueeze(2) + children.values).flatten(1)
    return _Level(tokens, scores)


def trees_of(grown: Grown) -> TreeProposal:
    """Read the shapes of trees that have grown."""
    shape = TreeShape([tuple(row) for row in grown.parents.tolist()])
    return TreeProposal(grown.tokens, shape)
