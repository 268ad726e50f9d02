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

from harness.drafting.heads.drafter import HeadDrafter
from harness.drafting.heads.prepared import PreparedHead
from harness.drafting.trees.growth import Grown, Growth
from harness.runners.checks import require_close
from harness.runners.graphs import TensorCall
from harness.runners.slots import UnsupportedModelError

# The share of nodes that a prepared tree must have in common with the eager one. Rounding may
# exchange nodes that score nearly the same, and whatever is drawn below them.
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
        is_prepared = number in self._numbers and drafter.warp == self._drafter.warp
        return number if is_prepared else None

    def unprepared(self, number: int) -> Callable[..., tuple[Any, ...]]:
        # A growth's tensors must be on the device before the call is compiled or captured.
        growth = self._drafter.growth(number)
        return functools.partial(self._drafter.grow, growth, number)

    def other_inputs(self, size: int, number: int) -> tuple[Tensor, ...]:
        """Uniforms [size, budget] and temperatures [size], low ones, so that trees are deep."""
        plan = self._drafter.plan
        assert plan is not None
        device = self._drafter.device
        uniforms = torch.full((size, plan.budget), 0.5, device=device)
        return uniforms, torch.full((size,), 0.1, device=device)

    def require_same(
        self, call: TensorCall, number: int, inputs: tuple[Tensor, ...], difference: str
    ) -> None:
        growth = self._drafter.growth(number)
        actual = _by_path(growth, call(*inputs))
        expected = _by_path(growth, self._eager(number)(*inputs))
        common = list(actual.keys() & expected.keys())
        num_roots = len(inputs[0])
        if len(common) - num_roots < _LEAST_IN_COMMON * (len(expected) - num_roots):
            raise UnsupportedModelError("grows other trees than the eager head")
        found = torch.stack([actual[path] for path in common])
        reference = torch.stack([expected[path] for path in common])
        # A token that a head excludes has no likelihood, and a logarithm of minus infinity.
        is_candidate = ~reference.isneginf()
        require_close([found[is_candidate]], [reference[is_candidate]], self._target, difference)


def _by_path(growth: Growth, outputs: tuple[Tensor, ...]) -> dict[Path, Tensor]:
    """Return what the root and each node of every tree were chosen by (`Grown`), by their paths.

    Args:
        outputs: the tensors of `Grown`.
    """
    grown = Grown(*outputs)
    proposal = growth.trees(grown)
    chosen_by = proposal.probabilities
    if chosen_by is None:
        # Scores or logits of the nodes; the root has none.
        chosen_by = functional.pad(grown.chosen_by, (1, 0))
    by_path: dict[Path, Tensor] = {}
    for row, tokens in enumerate(proposal.tokens.tolist()):
        paths: list[Path] = [(row,)]
        for token, parent in zip(tokens, proposal.shape.parents[row], strict=True):
            paths.append((*paths[parent], token))
        for number, path in enumerate(paths):
            by_path.setdefault(path, chosen_by[row, number])
    return by_path
