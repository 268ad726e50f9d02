"""Trees of draft tokens: several continuations of a row, verified in one forward pass.

The root of a tree, node 0, is the row's last token, which the target has not read yet. Nodes 1 to N
are draft tokens. A node attends to the text before the root, to its ancestors and to itself; its
position is the root's plus its depth. This tree has N = 3 nodes:

    0 ─┬─ 1 ─── 3       parents  (0, 0, 1)      of nodes 1, 2 and 3
       └─ 2             depths   [0, 1, 1, 2]   of nodes 0 to 3

Node 3 attends to the nodes 0, 1 and 3. A drafter proposes trees (`TreeProposal`), the target's
runner reads them in one pass, and a rule of `tree_rules` keeps one path from the root.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from harness.local.decoding.transfer import array_to_device, to_device

Parents = tuple[int, ...]


class PlacedShape(NamedTuple):
    """The shapes of B trees of N nodes each, as tensors. The module's docstring has an example.

    Attributes:
        parents: [B, N], of nodes 1 to N.
        depths: [B, N + 1], of nodes 0 to N, at most the row's limit.
        ancestors: [B, N + 1, N + 1] bool: [b, i, j] is whether node i attends to node j.
    """

    parents: Tensor
    depths: Tensor
    ancestors: Tensor


@dataclass(frozen=True)
class TreeShape:
    """The shapes of B trees of N nodes each.

    Attributes:
        parents: the parent of each node of each row: 0 is the root, j the j-th node. A parent comes
            before its children.
        limits: the deepest level that each row may use; None: any. Deeper nodes only fill up the
            batch. They take the position of that level, so that none is outside of the model's
            context.
    """

    parents: Sequence[Parents]
    limits: Sequence[int] | None = None

    def __post_init__(self) -> None:
        for parents in set(self.parents):
            for node, parent in enumerate(parents, start=1):
                if not 0 <= parent < node:
                    raise ValueError(f"node {node} of a tree cannot have the parent {parent}")

    @property
    def num_nodes(self) -> int:
        return len(self.parents[0])

    @cached_property
    def depths(self) -> NDArray[np.int64]:
        """The depths [B, N + 1] of the root and of each node, at most the row's limit."""
        return np.minimum(self._levels, self._deepest)

    @property
    def num_offered(self) -> list[int]:
        """How many nodes of each row are within its limit."""
        return self._is_offered.sum(1).tolist()

    def on(self, device: torch.device) -> PlacedShape:
        """Return the shapes on a device."""
        return PlacedShape(
            to_device(self.parents, device),
            self.depths_on(device),
            self.ancestors_on(device),
        )

    def depths_on(self, device: torch.device) -> Tensor:
        """Return `depths` on a device."""
        return array_to_device(self.depths, device)

    def ancestors_on(self, device: torch.device) -> Tensor:
        """Return which nodes each node attends to, [B, N + 1, N + 1] bool, on a device."""
        ancestors = np.stack([_ancestors(parents) for parents in self.parents])
        return array_to_device(ancestors, device)

    def offered_on(self, device: torch.device) -> Tensor:
        """Return which nodes [B, N] are within their row's limit, on a device."""
        return array_to_device(self._is_offered, device)

    @cached_property
    def _levels(self) -> NDArray[np.int64]:
        """The depths [B, N + 1], whatever the limits."""
        return np.stack([_depths(parents) for parents in self.parents])

    @cached_property
    def _deepest(self) -> NDArray[np.int64]:
        """The deepest level [B, 1] that each row may use."""
        limits = [self.num_nodes] * len(self.parents) if self.limits is None else self.limits
        return np.array(limits).reshape(-1, 1)

    @property
    def _is_offered(self) -> NDArray[np.bool_]:
        return self._levels[:, 1:] <= self._deepest


@lru_cache(maxsize=4096)
def _depths(parents: Parents) -> NDArray[np.int64]:
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    return np.array(depths)


@lru_cache(maxsize=4096)
def _ancestors(parents: Parents) -> NDArray[np.bool_]:
    size = len(parents) + 1
    ancestors = np.eye(size, dtype=bool)
    for node, parent in enumerate(parents, start=1):
        ancestors[node] |= ancestors[parent]
    return ancestors


def chain_of(num_nodes: int) -> Parents:
    """Return the parents of a tree in which every node has one child: (0, 1, 2, ...)."""
    return tuple(range(num_nodes))


@dataclass(frozen=True)
class TreeProposal:
    """A tree of draft tokens for each row, a function of the row's text.

    Attributes:
        tokens: [B, N], N >= 1.
        shape: the shapes of the trees.
    """

    tokens: Tensor
    shape: TreeShape

    def to(self, device: torch.device | str) -> TreeProposal:
        """Copy the tokens to another device."""
        return TreeProposal(self.tokens.to(device), self.shape)
