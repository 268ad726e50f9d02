"""How trees of draft tokens grow, whatever predicts the tokens.

A tree grows as tensors alone, which a compiler or a CUDA graph can take; the host then reads its
shape.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from harness.decoding.transfer import to_device
from harness.decoding.trees import Parents, TreeProposal, TreeShape, draw_child
from harness.drafting.text_branches import TextBranch, beside, merged

# A dynamic tree expands this many nodes of a level, and looks at as many children of each, as
# EAGLE-2 does, where each expansion takes time.
WIDTH = 10


class Predictor(Protocol):
    """Predicts the tokens after the nodes of growing trees, level by level.

    Attributes:
        width: the most nodes of a level that a dynamic tree expands; None for as many as it can
            use.
    """

    width: int | None = WIDTH

    def root(self) -> Tensor:
        """Return logits [B, 1, V] after the text."""
        ...

    def expand(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """Return logits [B, n, V] after n nodes of the next level; [B, 1, V] where all are alike.

        Args:
            tokens: [B, n] of these nodes.
            parents: [B, n], the places of their parents among the nodes of the last call.
        """
        ...


class Draws(NamedTuple):
    """What the nodes of a tree are drawn with.

    Attributes:
        uniforms: [B, budget].
        taken: [B], a token that is not drawn as a child of the root, because the row's text has a
            branch that begins with it.
        is_taken: [B], whether the row has such a branch.
        temperatures: [B], at which the nodes of a dynamic tree are scored.
    """

    uniforms: Tensor
    taken: Tensor
    is_taken: Tensor
    temperatures: Tensor


class Grown(NamedTuple):
    """Trees as tensors, before the host knows their shapes.

    Attributes:
        tokens: [B, N].
        chosen_by: what they were chosen by: the logarithms of their scores [B, N], their logits
            [B, N], or the distributions [B, N + 1, V] that the children of the root and of each
            node were drawn from.
        parents: [B, N], as in a `TreeShape`; None where the shape depends on no tensor.
        confidences: [B, N, C], the logarithm of each node's probability after its parent at C
            temperatures; None where nobody asks for them.
    """

    tokens: Tensor
    chosen_by: Tensor
    parents: Tensor | None = None
    confidences: Tensor | None = None


class Growth(ABC):
    """One way to grow a tree in each row, of a fixed size."""

    @abstractmethod
    def grow(self, predictor: Predictor, draws: Draws) -> Grown:
        """Grow trees. Nothing here depends on the values of a tensor, or waits for the device, but
        for what the predictor does.
        """

    @abstractmethod
    def trees(self, grown: Grown, branches: Sequence[TextBranch]) -> TreeProposal:
        """Read the shapes of trees that have grown, and join them with branches of the rows' texts.

        Args:
            branches: take the place of nodes that count less; none for trees of the predictor
                alone.
        """


class _Level(NamedTuple):
    """The nodes of one level that were looked at, and those that were expanded.

    Attributes:
        tokens, scores: [B, n]; the scores are logarithms.
        confidences: [B, n, C], see `Grown`.
        best: [B, width], the places of the expanded ones; None in the last level.
    """

    tokens: Tensor
    scores: Tensor
    confidences: Tensor | None
    best: Tensor | None = None


@dataclass(frozen=True)
class DynamicGrowth(Growth):
    """EAGLE-2 (Li et al. 2024, arXiv:2406.16858): expand the nodes that are likeliest to be
    reached, and keep the likeliest of all that were found.

    A node's score is the product of the predicted probabilities on its path, at the row's
    temperature, so a parent scores no less than its children. The trees follow from the texts alone.

    Attributes:
        candidates: the temperatures of `Grown.confidences`; none for None.
    """

    depth: int
    budget: int
    candidates: tuple[float, ...] = ()

    def grow(self, predictor: Predictor, draws: Draws) -> Grown:
        """See `Growth.grow`."""
        logits = predictor.root()
        width = min(predictor.width or self.budget, self.budget, logits.shape[-1])
        # Scores of the nodes that the logits follow: at first the root's.
        above = logits.new_zeros(len(logits), 1, dtype=torch.float32)
        # Rows that only fill up a batch have none.
        temperatures = torch.where(draws.temperatures > 0, draws.temperatures, 1.0)
        temperatures = temperatures.view(-1, 1, 1)
        levels: list[_Level] = []
        while len(levels) + 1 < self.depth:
            level = self._children(logits, temperatures, above, width)
            best = level.scores.topk(width, dim=1).indices
            levels.append(level._replace(best=best))
            above = level.scores.gather(1, best)
            logits = predictor.expand(level.tokens.gather(1, best), best // width)
        levels.append(self._children(logits, temperatures, above, width))
        return self._likeliest(levels, width)

    def _children(self, logits: Tensor, temperatures: Tensor, above: Tensor, width: int) -> _Level:
        """Return the n * width likeliest children of nodes [B, n] that score `above`."""
        logits = logits.float()
        confidence = (logits / temperatures).log_softmax(-1)
        children = confidence.topk(width, dim=-1)
        num_above = above.shape[1]
        tokens = children.indices.expand(-1, num_above, -1).flatten(1)
        scores = (above.unsqueeze(2) + children.values).flatten(1)
        if not self.candidates:
            return _Level(tokens, scores, None)
        chosen = logits.gather(2, children.indices)
        at_each = [
            chosen / temperature - (logits / temperature).logsumexp(-1, keepdim=True)
            for temperature in self.candidates
        ]
        confidences = torch.stack(at_each, dim=-1).expand(-1, num_above, -1, -1).flatten(1, 2)
        return _Level(tokens, scores, confidences)

    def _likeliest(self, levels: Sequence[_Level], width: int) -> Grown:
        """Return the trees of the nodes that score best, of all that were found."""
        tokens = torch.cat([level.tokens for level in levels], dim=1)
        scores = torch.cat([level.scores for level in levels], dim=1)
        parents = [torch.zeros_like(levels[0].tokens)]
        num_found = 0
        for level in levels:
            if level.best is not None:
                numbers = level.best + 1 + num_found
                parents.append(numbers.repeat_interleave(width, dim=1))
                num_found += level.tokens.shape[1]
        # Stable: a parent comes before a child that scores the same.
        order = scores.sort(dim=1, descending=True, stable=True).indices
        chosen = order[:, : self.budget].sort(dim=1).values
        chosen_parents = torch.cat(parents, dim=1).gather(1, chosen)
        # Numbers among all that were found become numbers among those that are chosen.
        places = torch.searchsorted(chosen + 1, chosen_parents) + 1
        renumbered = torch.where(chosen_parents == 0, 0, places)
        return Grown(
            tokens.gather(1, chosen),
            scores.gather(1, chosen),
            renumbered,
            _confidences(levels, chosen),
        )

    def trees(self, grown: Grown, branches: Sequence[TextBranch]) -> TreeProposal:
        """See `Growth.trees`."""
        assert grown.parents is not None
        shape = TreeShape([tuple(row) for row in grown.parents.tolist()])
        proposal = TreeProposal(grown.tokens, shape)
        if not _has_text(branches):
            return proposal
        return merged(proposal, grown.chosen_by.exp().tolist(), branches)


class StaticGrowth(Growth):
    """Draw trees of one shape, the children of each node without replacement, or take the
    likeliest ones.

    Args:
        parents: the shape.
        warp: what tokens are drawn with; None for the likeliest ones.
        values: of the nodes, falling, where texts are joined.
    """

    def __init__(
        self, parents: Parents, warp: Any, device: torch.device, values: Sequence[float] = ()
    ) -> None:
        self._parents = parents
        self._warp = warp
        self._values = values
        self._children: list[list[int]] = [[] for _ in range(len(parents) + 1)]
        for node, parent in enumerate(parents, start=1):
            self._children[parent].append(node)
        # The nodes of each level that have children, and for each the place of its parent in the
        # level above: on the device, because a prepared call cannot copy them there.
        self._levels = [[0]]
        self._places = [to_device([0], device)]
        while level := self._expanded_after(self._levels[-1]):
            places = [self._levels[-1].index(parents[node - 1]) for node in level]
            self._levels.append(level)
            self._places.append(to_device(places, device))

    def _expanded_after(self, level: Sequence[int]) -> list[int]:
        """Return the nodes below a level that have children."""
        below: list[int] = []
        for node in level:
            below += [child for child in self._children[node] if self._children[child]]
        return below

    def grow(self, predictor: Predictor, draws: Draws) -> Grown:
        """See `Growth.grow`."""
        num_rows = len(draws.uniforms)
        logits = predictor.root()
        tokens: dict[int, Tensor] = {}
        chosen_by: dict[int, Tensor] = {}
        for level, places in zip(self._levels, self._places, strict=True):
            if level != [0]:
                of_level = torch.stack([tokens[node] for node in level], dim=1)
                logits = predictor.expand(of_level, places.expand(num_rows, -1))
                logits = logits.expand(-1, len(level), -1)
            for place, node in enumerate(level):
                if self._warp is None:
                    self._take_likeliest(node, logits[:, place], tokens, chosen_by)
                else:
                    chosen_by[node] = self._warp(logits[:, place])
                    self._draw_children(node, chosen_by[node], draws, tokens)
        if self._warp is not None:
            # Nothing is drawn after leaves.
            nothing = torch.zeros_like(chosen_by[0])
            nodes = range(len(self._parents) + 1)
            distributions = [chosen_by.get(node, nothing) for node in nodes]
            return Grown(_in_order(tokens), torch.stack(distributions, dim=1))
        return Grown(_in_order(tokens), _in_order(chosen_by))

    def _take_likeliest(
        self, node: int, logits: Tensor, tokens: dict[int, Tensor], chosen_by: dict[int, Tensor]
    ) -> None:
        """Set the children of a node to the likeliest tokens by logits [B, V]; where these are too
        few, the other children to the last of them.
        """
        siblings = self._children[node]
        likeliest = logits.topk(min(len(siblings), logits.shape[-1]), dim=-1)
        for rank, child in enumerate(siblings):
            known = min(rank, likeliest.indices.shape[1] - 1)
            tokens[child] = likeliest.indices[:, known]
            chosen_by[child] = likeliest.values[:, known]

    def _draw_children(
        self, node: int, probabilities: Tensor, draws: Draws, tokens: dict[int, Tensor]
    ) -> None:
        """Draw the children of a node from probabilities [B, V] without replacement."""
        if node == 0:
            left = probabilities.scatter(1, draws.taken.unsqueeze(1), 0.0)
            probabilities = torch.where(draws.is_taken.unsqueeze(1), left, probabilities)
        siblings = draws.taken.new_empty(len(probabilities), 0)
        for child in self._children[node]:
            tokens[child] = draw_child(probabilities, siblings, draws.uniforms[:, child - 1])
            siblings = torch.cat([siblings, tokens[child].unsqueeze(1)], dim=1)

    def trees(self, grown: Grown, branches: Sequence[TextBranch]) -> TreeProposal:
        """See `Growth.trees`."""
        shape = TreeShape([self._parents] * len(grown.tokens))
        drawn_from = None if self._warp is None else grown.chosen_by
        proposal = TreeProposal(grown.tokens, shape, drawn_from)
        if not _has_text(branches):
            return proposal
        if self._warp is None:
            return merged(proposal, [self._values] * len(branches), branches)
        return beside(proposal, self._values, branches)


def _confidences(levels: Sequence[_Level], chosen: Tensor) -> Tensor | None:
    """Return the confidences of chosen nodes [B, N] -> [B, N, C]; None without any."""
    found = [level.confidences for level in levels if level.confidences is not None]
    if not found:
        return None
    of_all = torch.cat(found, dim=1)
    return of_all.gather(1, chosen.unsqueeze(2).expand(-1, -1, of_all.shape[2]))


def _in_order(of_nodes: dict[int, Tensor]) -> Tensor:
    """Stack a tensor [B] of each node by its number -> [B, N]."""
    return torch.stack([of_nodes[node] for node in sorted(of_nodes)], dim=1)


def _has_text(branches: Sequence[TextBranch]) -> bool:
    return any(branch.tokens for branch in branches)
