"""The cache of a draft head, with one slot for each position.

Say a row has entries in the slots 0 to 4, and a proposal writes three drafted tokens to 5, 6 and 7.
If the verdict accepts one of them, the next proposal writes from 6 on. What is left in 7 is
overwritten before any query may see it, so nothing is ever removed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from harness.local.runners.slots import Slots

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
        self._layers: dict[int, Slots] = {}

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
        slots = self._layers.get(layer, Slots([keys[:0], values[:0]]))
        if not slots.have_room(len(keys), self.num_slots):
            slots = slots.enlarged(len(keys), self.num_slots + SPARE_SLOTS)
            self._layers[layer] = slots
        all_keys, all_values = slots.buffers
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
        for slots in self._layers.values():
            slots.clear()

    def ensure_rows(self, num_rows: int) -> None:
        """Grow the buffers to at least `num_rows` rows.

        `select` may then name rows that joined, but that no `update` has written yet.
        """
        for layer, slots in self._layers.items():
            if slots.num_rows < num_rows:
                self._layers[layer] = slots.enlarged(num_rows)

    def select(self, rows: Tensor) -> None:
        """Move these rows to the front of the same buffers, in this order."""
        for slots in self._layers.values():
            slots.select(rows, slots.num_slots)

    def copied(self) -> SlotCache:
        """Return a cache with the same entries in buffers of its own."""
        copied = SlotCache()
        copied.num_slots = self.num_slots
        for layer, slots in self._layers.items():
            copied._layers[layer] = slots.enlarged(slots.num_rows)
        return copied

    @property
    def numbers_per_token(self) -> int:
        """How many numbers, keys and values of all layers, one entry has."""
        buffers = [buffer for slots in self._layers.values() for buffer in slots.buffers]
        return sum(buffer.shape[1] * buffer.shape[3] for buffer in buffers)

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
