"""Which trees a drafter proposes, by the settings of `draft.tree`: dynamic trees, or trees of one
shape.

`ModelDraftSettings.tree_plan` makes a `TreePlan` of the settings. The drafters of trees take from it a
`Growth`, which makes the trees (`growth`). The plan also says before decoding how large trees
can be, for what is prepared.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch

from harness.decoding.trees import Parents, TreeShape
from harness.decoding.warp import AnyWarp, current_warp
from harness.drafting.trees.growth import WIDTH, DynamicGrowth, Growth, StaticGrowth
from harness.drafting.trees.score_temperatures import (
    CANDIDATES,
    ScoreTemperature,
    temperatures_of,
)


@dataclass(frozen=True)
class TreePlan:
    """How a drafter's trees grow.

    Attributes:
        kind: `dynamic` chooses the nodes by the drafter's confidence, in every iteration; `static`
            trees have one shape.
        budget: the most nodes of a tree.
        rates: for static trees: how often the first, second, ... child of a node is accepted.
        score_temperature: for dynamic trees: as `ScoreTemperatures` takes it.
    """

    kind: Literal["static", "dynamic"]
    budget: int
    rates: tuple[float, ...] = ()
    score_temperature: ScoreTemperature = 1.0

    def is_deterministic(self, warp: AnyWarp) -> bool:
        """Return whether trees follow from the texts alone, if tokens are drawn with this warp."""
        return self.kind == "dynamic" or _is_greedy(warp)

    def most_expanded(self, depth: int) -> int:
        """Return the most nodes of a level that have children, in trees of this many levels."""
        if self.kind == "dynamic":
            return min(WIDTH, self.budget)
        parents = best_shape(self.rates, depth, self.budget)
        levels = TreeShape([parents]).depths[0]  # of the root, then of the nodes
        expanded = {parent for parent in parents if parent}
        return max(Counter(int(levels[node]) for node in expanded).values(), default=0)

    def growth(self, depth: int, warp: AnyWarp, device: torch.device) -> Growth:
        """Return how trees of at most `depth` levels grow on a device.

        Args:
            warp: what tokens are drawn with, where a tree is not deterministic.
        """
        # A running batch's warp changes with its rows; a growth that is kept has the one of now.
        return _growth(self, depth, current_warp(warp), device)


# Cached, because a `StaticGrowth` copies numbers to the device.
@lru_cache(maxsize=64)
def _growth(plan: TreePlan, depth: int, warp: AnyWarp, device: torch.device) -> Growth:
    if plan.kind == "dynamic":
        candidates = CANDIDATES if plan.score_temperature == "auto" else ()
        return DynamicGrowth(depth, plan.budget, candidates)
    drawn_with = None if _is_greedy(warp) else warp
    return StaticGrowth(best_shape(plan.rates, depth, plan.budget), drawn_with, device)


def _is_greedy(warp: AnyWarp) -> bool:
    return max(temperatures_of(warp)) == 0


@lru_cache(maxsize=64)
def best_shape(rates: Sequence[float], depth: int, budget: int) -> Parents:
    """Return the tree of at most `budget` nodes and `depth` levels with the most accepted tokens.

    The i-th child of a node is accepted with probability rates[i], wherever the node is (Sequoia,
    Chen et al. 2024, arXiv:2402.12374). A node's value is then the product on its path: with rates
    of 0.6 and 0.3 the root's children have 0.6 and 0.3, and the first child of the first one 0.36.
    No value is above that of the parent or of an elder sibling. So taking the best nodes one after
    the other gives the tree of Sequoia's dynamic programme: here the parents (0, 1, 0), whose
    values are 0.6, 0.36 and 0.3, for a budget of three.
    """
    # A later child is never accepted more often than an earlier one.
    falling = list(itertools.accumulate(rates, min))
    parents: list[int] = []
    # Of the root, then of the nodes that were taken.
    values = [1.0]
    levels = [0]
    # Nodes that may be taken next, each as its value (negative, because a heap has the smallest
    # first), its level, its parent and its rank among the parent's children.
    waiting: list[tuple[float, int, int, int]] = []

    def offer(parent: int, rank: int) -> None:
        level = levels[parent] + 1
        if rank < len(falling) and level <= depth and falling[rank] > 0:
            heapq.heappush(waiting, (-values[parent] * falling[rank], level, parent, rank))

    offer(0, 0)
    while waiting and len(parents) < budget:
        negative_value, level, parent, rank = heapq.heappop(waiting)
        parents.append(parent)
        values.append(-negative_value)
        levels.append(level)
        offer(parent, rank + 1)
        offer(len(parents), 0)
    return tuple(parents)
