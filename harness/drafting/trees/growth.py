"""How trees of draft tokens grow, whatever predicts the tokens.

`TreePlan.growth` chooses one `Growth` for the settings of `draft.tree`. The growth asks a
`Predictor`, which is a head or a draft model, for logits after the text (the root), and then level
by level after the nodes that it expands. It makes a tree in two steps: `grow` computes with tensors
alone, which a compiler or a CUDA graph can take whole; `trees` then reads the shapes on the host.

Say a draft gives the tokens a, b and c 0.6, 0.3 and 0.1 after the text, and c 0.8 after a. With two
levels and a budget of three nodes:

    dynamic  a 0.6, its child c 0.6 * 0.8 = 0.48, b 0.3: the three paths that score best
    static   parents (0, 0, 1): two children of the root, a child of the first; drawn, or a, b and c

Both are written as tokens [a, b, c] with parents (0, 0, 1): node 3 is the child of node 1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from harness.decoding.transfer import to_device
from harness.decoding.trees import Parents, TreeProposal, TreeShape, draw_child
from harness.decoding.warp import AnyWarp

# Where expanding a node costs a pass, a dynamic tree expands this many nodes of a level, and looks
# at as many children of each, as EAGLE-2 does.
WIDTH = 10


class Predictor(Protocol):
    """Predicts the tokens after the nodes of B growing trees, level by level.

    It serves one proposal: `root` is called once, then `expand` once for each further level.

    Attributes:
        width: the most nodes of a level that a dynamic tree expands; None, where that costs
            nothing, for as many as can be among the likeliest.
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
        chosen_by: what the nodes were chosen by. In a dynamic tree the logarithms of their scores
            [B, N]. In a static tree of likeliest tokens their logits [B, N]; in a drawn one the
            distributions [B, N + 1, V] that the children of the root and of each node were drawn
            from.
        parents: [B, N], as in a `TreeShape`, of a dynamic tree; None for a static one, whose shape
            is the plan's.
        confidences: [B, N, C], the logarithm of each node's probability after its parent at C
            temperatures; None unless `score_temperatures` learns from them.
    """

    tokens: Tensor
    chosen_by: Tensor
    parents: Tensor | None = None
    confidences: Tensor | None = None


class Growth(ABC):
    """One way to grow a tree in each row."""

    @abstractmethod
    def grow(self, predictor: Predictor, uniforms: Tensor, temperatures: Tensor) -> Grown:
        """Grow trees.

        Which operations run never depends on the values of a tensor, and none of them waits for the
        device. Only a predictor may wait, as that of a draft model does.

        Args:
            uniforms: [B, budget], one for each node that is drawn.
            temperatures: [B], at which the nodes of a dynamic tree are scored.
        """

    @abstractmethod
    def trees(self, grown: Grown) -> TreeProposal:
        """Read the shapes of trees that have grown."""


class _Level(NamedTuple):
    """The n nodes of one level that a dynamic tree looked at, and those that it expanded.

    Attributes:
        tokens, scores: [B, n]; the scores are logarithms.
        confidences: [B, n, C], as in `Grown`.
        expanded: [B, width], the places of the expanded ones, from 0; None in the last level.
    """

    tokens: Tensor
    scores: Tensor
    confidences: Tensor | None
    expanded: Tensor | None = None


@dataclass(frozen=True)
class DynamicGrowth(Growth):
    """EAGLE-2 (Li et al. 2024, arXiv:2406.16858): expand the nodes of each level that are likeliest
    to be reached, and keep the likeliest of all that were looked at.

    A node's score is the product of the predicted probabilities on its path, at the row's
    temperature, so a parent scores no less than its children. Nothing is drawn: the trees follow
    from the texts alone.

    Attributes:
        depth: the most levels.
        budget: the most nodes.
        candidates: C temperatures at which `Grown.confidences` are computed, from which
            `score_temperatures` takes the one that predicts acceptance best; empty to leave them
            out.
    """

    depth: int
    budget: int
    candidates: tuple[float, ...] = ()

    def grow(self, predictor: Predictor, uniforms: Tensor, temperatures: Tensor) -> Grown:
        logits = predictor.root()
        width = min(predictor.width or self.budget, self.budget, logits.shape[-1])
        # Scores of the nodes that the logits follow: at first the root's, the logarithm of 1.
        above = logits.new_zeros(len(logits), 1, dtype=torch.float32)
        # A prepared call is filled up with rows that have temperature 0.
        temperatures = torch.where(temperatures > 0, temperatures, 1.0)
        temperatures = temperatures.view(-1, 1, 1)
        levels: list[_Level] = []
        while len(levels) + 1 < self.depth:
            level = self._children(logits, temperatures, above, width)
            expanded = level.scores.topk(width, dim=1).indices
            levels.append(level._replace(expanded=expanded))
            above = level.scores.gather(1, expanded)
            # The children of node i are at places i * width to (i + 1) * width - 1.
            logits = predictor.expand(level.tokens.gather(1, expanded), expanded // width)
        levels.append(self._children(logits, temperatures, above, width))
        return self._likeliest(levels, width)

    def _children(self, logits: Tensor, temperatures: Tensor, above: Tensor, width: int) -> _Level:
        """Return the `width` likeliest children of each of n nodes that score `above` [B, n]."""
        logits = logits.float()
        children = (logits / temperatures).log_softmax(-1).topk(width, dim=-1)
        num_above = above.shape[1]
        tokens = children.indices.expand(-1, num_above, -1).flatten(1)
        scores = (above.unsqueeze(2) + children.values).flatten(1)
        if not self.candidates:
            return _Level(tokens, scores, None)
        # As `log_softmax` at each temperature, of these children alone.
        chosen = logits.gather(2, children.indices)
        at_each = [
            chosen / temperature - (logits / temperature).logsumexp(-1, keepdim=True)
            for temperature in self.candidates
        ]
        confidences = torch.stack(at_each, dim=-1).expand(-1, num_above, -1, -1).flatten(1, 2)
        return _Level(tokens, scores, confidences)

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
        confidences = None
        of_levels = [level.confidences for level in levels if level.confidences is not None]
        if of_levels:
            index = kept.unsqueeze(2).expand(-1, -1, len(self.candidates))
            confidences = torch.cat(of_levels, dim=1).gather(1, index)
        return Grown(
            tokens.gather(1, kept),
            scores.gather(1, kept),
            torch.where(old_parents == 0, 0, new_parents),
            confidences,
        )

    def trees(self, grown: Grown) -> TreeProposal:
        assert grown.parents is not None
        shape = TreeShape([tuple(row) for row in grown.parents.tolist()])
        return TreeProposal(grown.tokens, shape)


class StaticGrowth(Growth):
    """Fill trees of one shape: draw the children of each node without replacement, or take the
    likeliest ones.

    Args:
        parents: the shape.
        warp: what tokens are drawn with; None for the likeliest ones.
        device: where the trees grow.
    """

    def __init__(self, parents: Parents, warp: AnyWarp | None, device: torch.device) -> None:
        self._parents = parents
        self._warp = warp
        # The children of the root and of each node, by number: [[1, 2], [3], [], []] for (0, 0, 1).
        self._children: list[list[int]] = [[] for _ in range(len(parents) + 1)]
        for node, parent in enumerate(parents, start=1):
            self._children[parent].append(node)
        # The nodes of each level that have children, [[0], [1]] in this example, and the place of
        # each one's parent in the level above. The places are on the device already, because a
        # prepared call cannot copy them there.
        self._levels = [[0]]
        self._places = [to_device([0], device)]
        while True:
            above = self._levels[-1]
            below = [child for node in above for child in self._children[node]]
            level = [node for node in below if self._children[node]]
            if not level:
                break
            self._levels.append(level)
            places = [above.index(parents[node - 1]) for node in level]
            self._places.append(to_device(places, device))

    def grow(self, predictor: Predictor, uniforms: Tensor, temperatures: Tensor) -> Grown:
        num_rows = len(uniforms)
        logits = predictor.root()
        # By the node's number: its token [B], its logit [B] where it is one of the likeliest, and
        # the distribution [B, V] that its children were drawn from.
        tokens: dict[int, Tensor] = {}
        logits_of: dict[int, Tensor] = {}
        drawn_from: dict[int, Tensor] = {}
        for level, places in zip(self._levels, self._places, strict=True):
            if level != [0]:
                of_level = torch.stack([tokens[node] for node in level], dim=1)
                logits = predictor.expand(of_level, places.expand(num_rows, -1))
                logits = logits.expand(-1, len(level), -1)
            for place, node in enumerate(level):
                children = self._children[node]
                if self._warp is None:
                    num_known = min(len(children), logits.shape[-1])
                    likeliest = logits[:, place].topk(num_known, dim=-1)
                    for rank, child in enumerate(children):
                        # A vocabulary of fewer tokens than children repeats the last of them.
                        known = min(rank, num_known - 1)
                        tokens[child] = likeliest.indices[:, known]
                        logits_of[child] = likeliest.values[:, known]
                else:
                    drawn_from[node] = self._warp(logits[:, place])
                    # Where no mass is left (top_k=1, for example), a child is any token, which no
                    # rule accepts.
                    siblings = torch.empty(num_rows, 0, dtype=torch.long, device=uniforms.device)
                    for child in children:
                        drawn = draw_child(drawn_from[node], siblings, uniforms[:, child - 1])
                        tokens[child] = drawn
                        siblings = torch.cat([siblings, drawn.unsqueeze(1)], dim=1)
        if self._warp is not None:
            # Nothing is drawn after leaves.
            nothing = torch.zeros_like(drawn_from[0])
            nodes = range(len(self._parents) + 1)
            distributions = [drawn_from.get(node, nothing) for node in nodes]
            return Grown(_in_order(tokens), torch.stack(distributions, dim=1))
        return Grown(_in_order(tokens), _in_order(logits_of))

    def trees(self, grown: Grown) -> TreeProposal:
        shape = TreeShape([self._parents] * len(grown.tokens))
        return TreeProposal(grown.tokens, shape, None if self._warp is None else grown.chosen_by)


def _in_order(of_nodes: dict[int, Tensor]) -> Tensor:
    """Stack a tensor [B] of each node by its number -> [B, N]."""
    return torch.stack([of_nodes[node] for node in sorted(of_nodes)], dim=1)
