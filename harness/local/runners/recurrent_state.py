"""The state of a recurrent model, which `SnapshotRunner` copies, cuts to rows and joins.

transformers holds it in dictionaries, lists and caches of tensors; `map_tensors` makes another one
of the same form.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from harness.local.runners.base import stacked

# Names in transformers of attention's part of a state.
_KEYS = ("keys", "values")


@dataclass(frozen=True)
class RecurrentState:
    """The state of a model after `num_read` tokens of each row, padding included, by its names in
    transformers.
    """

    values: dict[str, Any]
    num_read: int = 0

    def copied(self) -> RecurrentState:
        """Copy the state, but not its keys and values: models replace those, and never write into
        them.
        """

        def copied(name: str, tensor: Tensor) -> Tensor:
            return tensor if name in _KEYS else tensor.clone()

        return RecurrentState(map_tensors(copied, self.values), self.num_read)

    def select(self, rows: Tensor) -> RecurrentState:
        """Return the state of these rows alone."""

        def selected(name: str, tensor: Tensor) -> Tensor:
            return tensor.index_select(0, rows.to(tensor.device))

        return RecurrentState(map_tensors(selected, self.values), self.num_read)

    @property
    def is_kv_cache(self) -> bool:
        """Whether it is keys and values of all tokens alone, which can be cut."""
        caches = [value for value in self.values.values() if isinstance(value, Cache)]
        layers = [layer for cache in caches for layer in cache.layers]
        is_whole = len(caches) == len(self.values)
        return is_whole and all(type(layer) is DynamicLayer for layer in layers)

    def cut(self, num_dropped: int, shifts: Sequence[int], num_padding: int) -> RecurrentState:
        """Drop the last tokens of all rows of a KV cache, move row b by shifts[b] to the right, over
        its own last tokens, and drop padding that all rows have on their left.
        """
        width = self.num_read - num_dropped

        def moved(name: str, states: Tensor) -> Tensor:
            kept = states[:, :, :width]
            if any(shifts):
                rows = zip(kept, shifts, strict=True)
                kept = torch.stack([row.roll(shift, dims=1) for row, shift in rows])
            return kept[:, :, num_padding:]

        return RecurrentState(map_tensors(moved, self.values), width - num_padding)

    def stacked_on(self, below: RecurrentState) -> RecurrentState:
        """Join the rows of two states. Keys and values of the one that has read less get padding on
        their left.
        """

        def joined(name: str, *tensors: Tensor) -> Tensor:
            return stacked(*tensors) if name in _KEYS else torch.cat(tensors)

        num_read = max(self.num_read, below.num_read)
        return RecurrentState(map_tensors(joined, self.values, below.values), num_read)


def map_tensors(change: Callable[..., Tensor], *structures: Any, name: str = "") -> Any:
    """Make one structure of several that have the same form, each tensor by `change(name,
    *tensors)`.

    The name is the key or attribute that holds the tensors. With {"keys": a, "width": 3} and
    {"keys": b, "width": 5} that is {"keys": change("keys", a, b), "width": 5}.
    """
    first = structures[0]
    if isinstance(first, Tensor):
        # A tensor without dimensions is the same in all rows, such as the width of a window.
        return change(name, *structures) if first.dim() else first
    if isinstance(first, dict):
        return {
            key: map_tensors(change, *(structure[key] for structure in structures), name=key)
            for key in first
        }
    if isinstance(first, list | tuple):
        return type(first)(
            map_tensors(change, *members) for members in zip(*structures, strict=True)
        )
    if isinstance(first, Cache):
        cache = copy.copy(first)
        cache.layers = []
        for layers in zip(*(structure.layers for structure in structures), strict=True):
            layer = copy.copy(layers[0])
            vars(layer).update(map_tensors(change, *map(vars, layers)))
            cache.layers.append(layer)
        return cache
    if isinstance(first, int):
        # Of the tokens that a window has seen, those of the longer state; other numbers are equal.
        return max(structures)
    return first
