"""Which trees a drafter proposes: dynamic trees, trees of one shape, or sequences."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from harness.decoding.trees import Parents, TreeProposal, TreeShape
from harness.drafting.score_temperatures import (
    CANDIDATES,
    ScoreTemperature,
    ScoreTemperatures,
    temperatures_of,
)
from harness.drafting.sequences import SequenceGrowth
from harness.drafting.text_branches import first_tokens
from harness.drafting.tree_growth import (
    WIDTH,
    Draws,
    DynamicGrowth,
    Growth,
    Predictor,
    StaticGrowth,
)


@dataclass(frozen=True)
class TreePlan:
    """How a drafter's trees grow.

    Attributes:
        kind: `dynamic` chooses the nodes by the drafter's confidence, in every iteration; `static`
            trees have one shape; `sequences` are drawn independently and merged.
        budget: the most nodes of a tree.
        rates: of a static tree: how often the first, second, ... child of a node is accepted.
        replacement: of sequences: whether several may begin with the same token.
        score_temperature: of dynamic trees, see `ScoreTemperatures`.
    """

    kind: Literal["static", "dynamic", "sequences"]
    budget: int
    rates: tuple[float, ...] = ()
    replacement: bool = True
    score_temperature: ScoreTemperature = 1.0

    def is_deterministic(self, warp: Any) -> bool:
        """Whether trees follow from the texts alone, where tokens are drawn with this warp."""
        return self.kind == "dynamic" or _is_greedy(warp)

    def most_expanded(self, depth: int) -> int:
        """Return the most nodes of a level that are expanded, in trees of this many levels."""
        if self.kind == "dynamic":
            return min(WIDTH, self.budget)
        if self.kind == "sequences":
            return self.budget // min(depth, self.budget)
        parents = best_shape(self.rates, depth, self.budget)
        levels = TreeShape([parents]).depths[0]
        expanded = {parent for parent in parents if parent}
        return max(Counter(int(levels[node]) for node in expanded).values(), default=0)

    def growth(self, depth: int, warp: Any, device: torch.device) -> Growth:
        """Return how trees of at most `depth` levels grow on a device.

        Args:
            warp: what tokens are drawn with, where a tree is not deterministic.
        """
        return _growth(self, depth, getattr(warp, "current", warp), device)

    def propose(
        self,
        predictor: Predictor,
        depth: int,
        warp: Any,
        uniforms: Tensor,
        scores: ScoreTemperatures | None = None,
    ) -> TreeProposal:
        """Grow a tree for each row, with uniforms [B, budget]; other arguments as of `growth`.

        Args:
            scores: of the rows, which follows their trees; None for rows without a past.
        """
        device = uniforms.device
        if scores is None:
            scores = ScoreTemperatures(self.score_temperature)
            scores.add(len(uniforms))
        growth = self.growth(depth, warp, device)
        taken = first_tokens((), len(uniforms), device)
        grown = growth.grow(predictor, Draws(uniforms, *taken, scores.of_rows(warp, device)))
        scores.remember(grown)
        return growth.trees(grown, ())


@lru_cache(maxsize=64)
def _growth(plan: TreePlan, depth: int, warp: Any, device: torch.device) -> Growth:
    if plan.kind == "dynamic":
        candidates = CANDIDATES if plan.score_temperature == "auto" else ()
        return DynamicGrowth(depth, plan.budget, candidates)
    static_warp = None if _is_greedy(warp) else warp
    if plan.kind == "static":
        parents = best_shape(plan.rates, depth, plan.budget)
        values = shape_values(plan.rates, parents)
        return StaticGrowth(parents, static_warp, device, values)
    depth = min(depth, plan.budget)
    num_sequences = plan.budget // depth
    if plan.replacement and not _is_greedy(warp):
        return SequenceGrowth(num_sequences, depth, warp)
    # Sequences of likeliest tokens would all be the same, so they begin with different ones.
    return StaticGrowth(sequences_shape(num_sequences, depth), static_warp, device)


def sequences_shape(num_sequences: int, depth: int) -> Parents:
    """Return the tree of sequences that differ from their first token on."""
    parents: list[int] = []
    for _ in range(num_sequences):
        first = len(parents) + 1
        parents += [0, *range(first, first + depth - 1)]
    return tuple(parents)


def _is_greedy(warp: Any) -> bool:
    return max(temperatures_of(warp)) == 0


@lru_cache(maxsize=64)
def best_shape(rates: Sequence[float], depth: int, budget: int) -> Parents:
    """Return the tree of `budget` nodes or fewer with the most accepted tokens.

    The i-th child of a node is accepted with probability rates[i], wherever the node is (Sequoia,
    Chen et al. 2024, arXiv:2402.12374). A node then counts by the product on its path, no more than
    its parent or an elder sibling, so the nodes that count most are the tree of Sequoia's dynamic
    programme.
    """
    # Falling rates: a later child is never accepted more often than an earlier one.
    falling = list(itertools.accumulate(rates, min))
    parents: list[int] = []
    waiting: list[tuple[float, int, int, int, float]] = []

    def offer(above: float, level: int, parent: int, rank: int) -> None:
        if rank < len(falling) and level <= depth and falling[rank] > 0:
            heapq.heappush(waiting, (-above * falling[rank], level, parent, rank, above))

    offer(1.0, 1, 0, 0)
    while waiting and len(parents) < budget:
        value, level, parent, rank, above = heapq.heappop(waiting)
        parents.append(parent)
        offer(above, level, parent, rank + 1)
        offer(-value, level + 1, len(parents), 0)
    return tuple(parents)


def shape_values(rates: Sequence[float], parents: Parents) -> list[float]:
    """Return the chance that each node of the tree of `best_shape` is reached and accepted."""
    falling = list(itertools.accumulate(rates, min))
    values = [1.0]
    num_children = [0] * (len(parents) + 1)
    for parent in parents:
        values.append(values[parent] * falling[num_children[parent]])
        num_children[parent] += 1
    return values[1:]
