"""A head's whole trees as prepared calls: compiled, captured as CUDA graphs, or both.

A call reads the features, predicts all levels, and chooses the nodes (`HeadDrafter.grow`).
`PreparedHead` does the preparing, as for chains; here is what differs for trees. Each prepared
call is compared with the eager one, node by node: a node is known by its path, because rounding may
change the order of nodes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from harness.local.drafting.heads.drafter import HeadDrafter
from harness.local.drafting.heads.prepared import PreparedHead
from harness.local.drafting.trees.growth import Grown, trees_of
from harness.local.runners.checks import require_close
from harness.local.runners.graphs import TensorCall
from harness.local.runners.slots import UnsupportedModelError

# The share of nodes that a prepared tree must have in common with the eager one. Rounding may
# exchange nodes that score nearly the same, and all below them.
_LEAST_IN_COMMON = 0.5

# A row's number, then the tokens on the way from its root to a node. (2,) is the root of row 2.
Path = tuple[int, ...]


class PreparedTrees(PreparedHead):
    """Prepared trees of a head. Numbers that `PreparedHead` takes are of levels, not of tokens."""

    def prepared_numbers(self, numbers: Sequence[int]) -> list[int]:
        """A head may know fewer levels."""
        return sorted({self._drafter.num_drafted(number) for number in numbers})

    def number_for(self, drafter: HeadDrafter, number: int) -> int | None:
        """Only trees of just this depth will do: deeper ones have other nodes."""
        return number if number in self._numbers else None

    def unprepared(self, number: int) -> Callable[..., tuple[Any, ...]]:
        return functools.partial(self._drafter.grow, number)

    def other_inputs(self, size: int, number: int) -> tuple[Tensor, ...]:
        """Trees need nothing beside the features."""
        return ()

    def require_same(
        self, call: TensorCall, number: int, inputs: tuple[Tensor, ...], difference: str
    ) -> None:
        actual = _by_path(call(*inputs))
        expected = _by_path(self._eager(number)(*inputs))
        common = list(actual.keys() & expected.keys())
        num_roots = len(inputs[0])
        if len(common) - num_roots < _LEAST_IN_COMMON * (len(expected) - num_roots):
            raise UnsupportedModelError("grows other trees than the eager head")
        found = torch.stack([actual[path] for path in common])
        reference = torch.stack([expected[path] for path in common])
        # A token that a head excludes has no likelihood, and a logarithm of minus infinity.
        is_candidate = ~reference.isneginf()
        require_close([found[is_candidate]], [reference[is_candidate]], self._target, difference)


def _by_path(outputs: tuple[Tensor, ...]) -> dict[Path, Tensor]:
    """Return the score of the root and of each node of every tree, by their paths.

    Args:
        outputs: the tensors of `Grown`.
    """
    grown = Grown(*outputs)
    proposal = trees_of(grown)
    # The root has no score.
    scores = functional.pad(grown.scores, (1, 0))
    by_path: dict[Path, Tensor] = {}
    for row, tokens in enumerate(proposal.tokens.tolist()):
        paths: list[Path] = [(row,)]
        for token, parent in zip(tokens, proposal.shape.parents[row], strict=True):
            paths.append((*paths[parent], token))
        for number, path in enumerate(paths):
            by_path.setdefault(path, scores[row, number])
    return by_path
