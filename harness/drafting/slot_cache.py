"""The cache of a draft head, with one slot per position."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

# A full cache grows by so many slots.
SPARE_SLOTS = 256


class SlotCache:
    """Keys and values of a head's layers: the entry at position p of a row is in slot p.

    Every query says which slots it sees. So entries that were made from rejected tokens need no
    removal: they are overwritten before their positions are seen.

    Attributes:
        positions: [B, n], where `update` writes next.
        num_slots: how many slots queries may see.
    """

    def __init__(self) -> None:
        self.positions = torch.empty(0, dtype=torch.long)
        self.num_slots = 0
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values [B, heads, n, D], return all slots [B, heads, S, D].

        transformers' attention calls it.
        """
        buffers = self._buffers(layer, keys, values)
        index = self.positions[:, None, :, None]
        for buffer, states in zip(buffers, (keys, values), strict=True):
            buffer.scatter_(2, index.expand_as(states), states)
        all_keys, all_values = buffers
        return all_keys[:, :, : self.num_slots], all_values[:, :, : self.num_slots]

    def _buffers(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's buffers, grown where they are too small."""
        buffers = self._layers.get(layer)
        if buffers is not None and buffers[0].shape[2] >= self.num_slots:
            return buffers
        size = self.num_slots + SPARE_SLOTS
        grown = []
        for number, states in enumerate((keys, values)):
            num_rows, num_heads, _, width = states.shape
            buffer = states.new_zeros(num_rows, num_heads, size, width)
            if buffers is not None:
                smaller = buffers[number]
                buffer[:, :, : smaller.shape[2]] = smaller
            grown.append(buffer)
        self._layers[layer] = grown[0], grown[1]
        return self._layers[layer]

    def add(self, num_rows: int) -> None:
        """Add empty rows behind the others."""
        padding = (0, 0, 0, 0, 0, 0, 0, num_rows)
        for layer, (keys, values) in self._layers.items():
            padded_keys = nn.functional.pad(keys, padding)
            self._layers[layer] = padded_keys, nn.functional.pad(values, padding)

    def select(self, rows: Tensor) -> None:
        """Keep these rows only."""
        for layer, (keys, values) in self._layers.items():
            self._layers[layer] = keys[rows], values[rows]

    @property
    def token_size(self) -> int:
        """Numbers of one entry, in all layers."""
        size = 0
        for keys, values in self._layers.values():
            size += keys.shape[1] * keys.shape[3] + values.shape[1] * values.shape[3]
        return size

    def causal(self, window: int | None) -> Tensor:
        """Mask [B, 1, n, S] of the slots up to each query's own, within the window."""
        last = self.positions
        first = torch.zeros_like(last) if window is None else last - window + 1
        return self.seen(first, last)

    def seen(self, first: Tensor, last: Tensor) -> Tensor:
        """Mask [B, 1, n, S] of the slots from `first` to `last` [B, n] of each query."""
        slots = torch.arange(self.num_slots, device=last.device)
        not_before = slots >= first.unsqueeze(-1)
        not_after = slots <= last.unsqueeze(-1)
        return (not_before & not_after).unsqueeze(1)
