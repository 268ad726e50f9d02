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
    removal: they are overwritten before their positions are seen. Rows that were never written cost
    nothing either: buffers may have more of them than a batch.

    Attributes:
        positions: [B, n], where `update` writes next.
        num_slots: how many slots queries may see.

    Args:
        num_spare: how many slots more are allocated.
    """

    def __init__(self, num_spare: int = SPARE_SLOTS) -> None:
        self._num_spare = num_spare
        self.positions = torch.empty(0, dtype=torch.long)
        self.num_slots = 0
        # Nodes of a tree share positions: the slots where `update` writes them, and what they see.
        self._places: Tensor | None = None
        self._visible: Tensor | None = None
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def place(self, starts: Tensor, count: int) -> None:
        """Make `update` write `count` entries of each row next, from slots `starts` [B] on."""
        ahead = torch.arange(count, device=starts.device)
        self.positions = starts.unsqueeze(1) + ahead

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values [B, heads, n, D], return all slots [B, heads, S, D].

        transformers' attention calls it.
        """
        all_keys, all_values = self._buffers(layer, keys, values)
        return self._write(all_keys, keys), self._write(all_values, values)

    def _write(self, buffer: Tensor, states: Tensor) -> Tensor:
        num_rows, num_heads = states.shape[:2]
        rows = torch.arange(num_rows, device=states.device).view(-1, 1, 1)
        heads = torch.arange(num_heads, device=states.device).view(-1, 1)
        # Not through a view, which a compiler would copy.
        places = self.positions if self._places is None else self._places
        buffer.index_put_((rows, heads, places.unsqueeze(1)), states)
        return buffer[:num_rows, :, : self.num_slots]

    def _buffers(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's buffers, grown where they are too small."""
        num_rows = len(keys)
        if layer not in self._layers:
            self._layers[layer] = self._allocate(keys, num_rows), self._allocate(values, num_rows)
            return self._layers[layer]
        old_keys, old_values = self._layers[layer]
        rows_held, _, slots_held, _ = old_keys.shape
        if rows_held < num_rows or slots_held < self.num_slots:
            num_rows = max(num_rows, rows_held)
            all_keys = self._allocate(keys, num_rows)
            all_values = self._allocate(values, num_rows)
            all_keys[:rows_held, :, :slots_held] = old_keys
            all_values[:rows_held, :, :slots_held] = old_values
            self._layers[layer] = all_keys, all_values
        return self._layers[layer]

    def _allocate(self, states: Tensor, num_rows: int) -> Tensor:
        """An empty buffer for keys or values such as these [B, heads, n, D]."""
        _, num_heads, _, width = states.shape
        return states.new_zeros(num_rows, num_heads, self.num_slots + self._num_spare, width)

    def hold(self, num_rows: int) -> None:
        """Have at least so many rows."""
        for layer, (keys, values) in self._layers.items():
            missing = num_rows - len(keys)
            if missing > 0:
                padding = (0, 0, 0, 0, 0, 0, 0, missing)
                more_keys = nn.functional.pad(keys, padding)
                more_values = nn.functional.pad(values, padding)
                self._layers[layer] = more_keys, more_values

    def select(self, rows: Tensor) -> None:
        """Move these rows to the front, in this order."""
        for buffers in self._layers.values():
            for buffer in buffers:
                buffer[: len(rows)] = buffer[rows]

    def repeat(self, rows: Tensor) -> None:
        """Replace the buffers by copies of these rows, each of which may come several times."""
        for layer, (keys, values) in self._layers.items():
            self._layers[layer] = keys[rows], values[rows]

    def twin(self) -> SlotCache:
        """A cache in the same buffers, until either of them grows."""
        twin = SlotCache()
        twin.num_slots = self.num_slots
        twin._layers = dict(self._layers)
        return twin

    def shares(self, other: SlotCache) -> bool:
        """Whether both are in the same buffers."""
        pairs = zip(self._layers.values(), other._layers.values(), strict=True)
        return all(mine[0] is theirs[0] for mine, theirs in pairs)

    def place_tree(
        self, positions: Tensor, first: Tensor, longest: int, num_before: int, visible: Tensor
    ) -> None:
        """Make `update` write n nodes of a tree next, until `end_tree`.

        Args:
            positions: [B, n].
            first: [B, 1], the slot of the first node of each row; those before it are its text's.
            longest: the largest of them.
            num_before: nodes that were written before.
            visible: [B, n, num_before + n], the nodes that each of these sees.
        """
        num_rows, count = positions.shape
        device = positions.device
        nodes = first + torch.arange(num_before + count, device=device)
        self.positions = positions
        self.num_slots = longest + num_before + count
        self._places = nodes[:, num_before:]
        is_text = torch.arange(self.num_slots, device=device) < first
        seen = is_text.unsqueeze(1).repeat(1, count, 1)
        places = nodes.unsqueeze(1).expand(num_rows, count, -1)
        self._visible = seen.scatter(2, places, visible).unsqueeze(1)

    def end_tree(self) -> None:
        """Go on with texts."""
        self._places = self._visible = None

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
        if self._visible is None:
            first = torch.zeros_like(last) if window is None else last - window + 1
            return self.seen(first, last)
        if window is None:
            return self._visible
        slots = torch.arange(self.num_slots, device=last.device)
        is_within = slots > last.unsqueeze(-1) - window
        return self._visible & is_within.unsqueeze(1)

    def seen(self, first: Tensor, last: Tensor) -> Tensor:
        """Mask [B, 1, n, S] of the slots from `first` to `last` [B, n] of each query."""
        slots = torch.arange(self.num_slots, device=last.device)
        not_before = slots >= first.unsqueeze(-1)
        not_after = slots <= last.unsqueeze(-1)
        return (not_before & not_after).unsqueeze(1)
