"""The cache of a draft head, with one slot for each position.

Say a row has entries in the slots 0 to 4, and a proposal writes three drafted tokens to 5, 6 and 7.
If the verdict accepts one of them, the next proposal writes from 6 on. What is left in 7 is
overwritten before any query may see it, so nothing is ever removed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# How many slots beyond the needed ones are allocated when a cache grows.
SPARE_SLOTS = 256


class SlotCache:
    """Keys and values of a head's layers: the entry at position p of a row is in slot p.

    A head's drafter calls `place`, and then the head's layers call `update` and ask for a mask of
    the slots that each query sees. The buffers may have more rows than the batch; `update` returns
    only the batch's.

    Attributes:
        positions: [B, n], the positions of the entries that `update` writes next.
        num_slots: the number of slots S that `update` returns and masks cover, at least as many as
            are written. The drafter sets it once for a whole proposal: `place` cannot know it, as
            `starts` is on the device, and compiled proposals need a fixed S.
    """

    def __init__(self) -> None:
        self.positions = torch.empty(0, dtype=torch.long)
        self.num_slots = 0
        # For each layer its keys and its values [rows, heads, slots, D].
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def place(self, starts: Tensor, count: int) -> None:
        """Make `update` write `count` entries of each row next, from position `starts` [B] on."""
        ahead = torch.arange(count, device=starts.device)
        self.positions = starts.unsqueeze(1) + ahead

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values [B, heads, n, D], return those of all slots [B, heads, S, D].

        transformers' attention calls it.
        """
        num_rows = len(keys)
        all_keys, all_values = self._layers.get(layer, (keys[:0], values[:0]))
        if len(all_keys) < num_rows or all_keys.shape[2] < self.num_slots:
            num_slots = self.num_slots + SPARE_SLOTS
            all_keys = _enlarged(all_keys, num_rows, num_slots)
            all_values = _enlarged(all_values, num_rows, num_slots)
            self._layers[layer] = all_keys, all_values
        return self._write(all_keys, keys), self._write(all_values, values)

    def _write(self, buffer: Tensor, states: Tensor) -> Tensor:
        num_rows, num_heads = states.shape[:2]
        rows = torch.arange(num_rows, device=states.device).view(-1, 1, 1)
        heads = torch.arange(num_heads, device=states.device).view(-1, 1)
        # Into the whole buffer: a compiler would copy a view such as `buffer[:num_rows]`.
        buffer.index_put_((rows, heads, self.positions.unsqueeze(1)), states)
        return buffer[:num_rows, :, : self.num_slots]

    def clear(self) -> None:
        """Zero all slots, in place: a mask does not hide nan."""
        for keys, values in self._layers.values():
            keys.zero_()
            values.zero_()

    def ensure_rows(self, num_rows: int) -> None:
        """Grow the buffers to at least `num_rows` rows.

        `select` may then name rows that joined, but that no `update` has written yet.
        """
        for layer, (keys, values) in self._layers.items():
            if len(keys) < num_rows:
                self._layers[layer] = _enlarged(keys, num_rows), _enlarged(values, num_rows)

    def select(self, rows: Tensor) -> None:
        """Move these rows to the front of the same buffers, in this order."""
        for buffers in self._layers.values():
            for buffer in buffers:
                buffer[: len(rows)] = buffer[rows]

    def copied(self) -> SlotCache:
        """Return a cache with the same entries in buffers of its own."""
        copied = SlotCache()
        copied.num_slots = self.num_slots
        for layer, (keys, values) in self._layers.items():
            copied._layers[layer] = keys.clone(), values.clone()
        return copied

    @property
    def numbers_per_token(self) -> int:
        """How many numbers, keys and values of all layers, one entry has."""
        total = 0
        for keys, values in self._layers.values():
            total += keys.shape[1] * keys.shape[3] + values.shape[1] * values.shape[3]
        return total

    def causal_mask(self, window: int | None) -> Tensor:
        """Return a mask [B, 1, n, S] of what each entry sees: nothing after it, within the
        window.
        """
        last = self.positions
        first = torch.zeros_like(last) if window is None else last - window + 1
        return self.range_mask(first, last)

    def range_mask(self, first: Tensor, last: Tensor) -> Tensor:
        """Return a mask [B, 1, n, S] of the slots from `first` to `last` [B, n] of each entry."""
        slots = torch.arange(self.num_slots, device=last.device)
        not_before = slots >= first.unsqueeze(-1)
        not_after = slots <= last.unsqueeze(-1)
        return (not_before & not_after).unsqueeze(1)


def _enlarged(buffer: Tensor, num_rows: int, num_slots: int = 0) -> Tensor:
    """Return a copy of a buffer with at least as many rows and slots, the new ones zero."""
    num_old_rows, num_heads, num_old_slots, width = buffer.shape
    shape = (max(num_rows, num_old_rows), num_heads, max(num_slots, num_old_slots), width)
    enlarged = buffer.new_zeros(shape)
    enlarged[:num_old_rows, :, :num_old_slots] = buffer
    return enlarged
