"""A head's trees as prepared calls: reading the features, every level, and choosing the nodes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from harness.drafting.head_drafter import HeadDrafter
from harness.drafting.head_trees import HeadTrees
from harness.drafting.prepared_head import PreparedHead
from harness.drafting.tree_growth import Draws, Grown, Growth
from harness.runners.checks import require_close
from harness.runners.compiled import TensorCall
from harness.runners.slots import UnsupportedModelError

# Rounding may exchange nodes that count nearly the same, and what is drawn below them.
_LEAST_IN_COMMON = 0.5


class _Nodes(NamedTuple):
    """The roots and nodes of all rows by their paths, and what each was chosen by.

    Attributes:
        places: the row and the number of each; a path begins with its row's number.
        chosen_by: [B, N + 1, ...].
    """

    places: dict[tuple[int, ...], tuple[int, int]]
    chosen_by: Tensor

    def numbers(self, paths: Iterable[tuple[int, ...]]) -> Tensor:
        """Return what the nodes with these paths were chosen by."""
        return torch.stack([self.chosen_by[self.places[path]] for path in paths])


class PreparedTrees(PreparedHead):
    """Prepared trees of a head; arguments as of `PreparedHead`, and numbers are of levels."""

    _drafter: HeadTrees

    def prepared_numbers(self, numbers: Sequence[int]) -> list[int]:
        """See `PreparedHead.prepared_numbers`. A head may know fewer levels."""
        return sorted({self._drafter.num_drafted(number) for number in numbers})

    def number_for(self, drafter: HeadDrafter, number: int) -> int | None:
        """See `head_drafter.PreparedDrafts`. A deeper tree has other nodes."""
        is_prepared = number in self._numbers and drafter.warp == self._drafter.warp
        return number if is_prepared else None

    def proposal(self, number: int) -> Callable[..., tuple[Any, ...]]:
        """See `PreparedHead.proposal`."""
        # Made here: its tensors must be on the device before a call is traced or captured.
        growth = self._drafter.growth(number)
        return functools.partial(self._drafter.grow, growth, number)

    def example(self, size: int, number: int) -> tuple[Tensor, ...]:
        """See `PreparedHead.example`. A text has taken a token. Low temperatures make deep trees."""
        device = self._drafter.device
        uniforms = torch.full((size, self._drafter.plan.budget), 0.5, device=device)
        taken = torch.ones(size, dtype=torch.long, device=device)
        temperatures = torch.full((size,), 0.1, device=device)
        return Draws(uniforms, taken, taken > 0, temperatures)

    def require_same(
        self, call: TensorCall, number: int, inputs: tuple[Tensor, ...], difference: str
    ) -> None:
        """See `PreparedHead.require_same`."""
        growth = self._drafter.growth(number)
        actual = _nodes(growth, call(*inputs))
        expected = _nodes(growth, self._eager(number)(*inputs))
        common = list(actual.places.keys() & expected.places.keys())
        num_roots = len(inputs[0])
        num_nodes = len(expected.places) - num_roots
        if len(common) - num_roots < _LEAST_IN_COMMON * num_nodes:
            raise UnsupportedModelError("grows other trees than the eager head")
        found, reference = actual.numbers(common), expected.numbers(common)
        # Candidates that a head excludes have no likelihood.
        is_candidate = ~reference.isneginf()
        require_close([found[is_candidate]], [reference[is_candidate]], self._target, difference)


def _nodes(growth: Growth, outputs: tuple[Tensor, ...]) -> _Nodes:
    """Find the paths of trees that have grown."""
    grown = Grown(*outputs)
    proposal = growth.trees(grown, ())
    chosen_by = proposal.probabilities
    if chosen_by is None:
        chosen_by = functional.pad(grown.chosen_by, (1, 0))
    places: dict[tuple[int, ...], tuple[int, int]] = {}
    for row, tokens in enumerate(proposal.tokens.tolist()):
        paths: list[tuple[int, ...]] = [(row,)]
        for token, parent in zip(tokens, proposal.shape.parents[row], strict=True):
            paths.append((*paths[parent], token))
        for number, path in enumerate(paths):
            places.setdefault(path, (row, number))
    return _Nodes(places, chosen_by)
