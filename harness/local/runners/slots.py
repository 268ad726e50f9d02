"""A KV cache of fixed size, in which each row has *slots*: places for the keys and values of its tokens.

The token at position p of a row is in slot p of the row, whatever happens in other rows. So rolling back a row only
changes its length. Positions and sliding windows need no bookkeeping, because a mask that compares slots compares
positions. Slots after the last token of a row have no influence, and are overwritten later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from harness.local.decoding.transfer import to_device

# Indices of rows, heads and slots.
_Indices = tuple[Tensor, Tensor, Tensor]
# The keys and the values of each layer, each [rows, heads, n, D] with at least one row, by the layer's number.
KeysAndValues = Mapping[int, tuple[Tensor, Tensor]]


class SlotCache(Cache):
    """The keys and values of the layers of a model or a draft head. The entry at position p of a row is in slot p.

    For example, a row has entries in the slots 0 to 4, and a pass writes the entries of three draft tokens to the slots
    5, 6 and 7. If the verdict accepts one draft token, the next pass writes from slot 6 on. The old entry in slot 7 is
    overwritten before a query can see it. So entries are never removed.

    Before each pass, `place` or `place_alike` must be called. In the pass, each layer calls `update`, and masks select
    the slots that its queries see. The buffers may have more rows than the batch; `update` returns only the rows of the
    batch.

    Attributes:
        num_rows: R, the number of rows of the buffers; the batch has B of them.
        num_slots: S, the number of slots of each row.
        width: how many slots `update` returns, and masks cover. It must include all slots that running rows write.
        positions: [B or 1, n], the positions of the entries that `update` writes next.
        buffers: the keys and values of each layer, [R, heads, S, D] each. They are allocated when they are first
            written. The slots of one attention head are contiguous in memory, which halves the time to read them from
            main memory.
    """

    # If this were True, transformers would make a mask even if none is needed.
    is_compileable = False

    def __init__(self, num_rows: int = 0, num_slots: int = 0) -> None:
        # transformers' layers are not used: the buffers replace them.
        super().__init__(layers=[])
        self.num_rows = num_rows
        self.num_slots = num_slots
        self.width = num_slots
        self.positions = torch.empty(0, 0, dtype=torch.long)
        self.buffers: dict[int, tuple[Tensor, Tensor]] = {}
        # `update` writes from slot `_start` on in all rows. If `_start` is None, it writes at `_indices`, which exist
        # for each device and number of heads.
        self._start: int | None = None
        self._indices: dict[tuple[torch.device, int], _Indices] = {}

    def has_room(self, num_rows: int, num_slots: int) -> bool:
        return num_rows <= self.num_rows and num_slots <= self.num_slots

    def write(self, states: KeysAndValues, rows: Sequence[int], sources: Sequence[int]) -> None:
        """Copy keys and values into the first slots of some rows. With rows [0, 2, 1] and sources [0, 0, 1], the first
        row of `states` is copied to the rows 0 and 2, and the second row to row 1.

        Args:
            states: the keys and values of each layer, [rows, heads, n, D].
            rows: the rows of the cache to write.
            sources: for each of these rows, the row of `states` to copy.
        """
        # `rows` and `sources` as tensors, by their device, because the layers may be on several devices.
        indices: dict[torch.device, tuple[Tensor, Tensor]] = {}
        for layer, pair in states.items():
            self._make_layer(layer, pair)
            device = pair[0].device
            if device not in indices:
                indices[device] = to_device(rows, device), to_device(sources, device)
            to_rows, from_rows = indices[device]
            for buffer, state in zip(self.buffers[layer], pair, strict=True):
                buffer[to_rows, :, : state.shape[2]] = state[from_rows]

    def place(self, starts: Tensor, count: int) -> None:
        """Set the positions at which `update` writes next: `count` entries in each row, from the positions `starts` [B]
        on.
        """
        ahead = torch.arange(count, device=starts.device)
        self.positions = starts.unsqueeze(1) + ahead
        self._start = None
        # The indices are computed before any layer runs, so that equal layers have equal code when they are compiled.
        # For kinds of layers that have not been run yet, `_make_layer` computes them.
        for device, num_heads in self._indices:
            self._indices[device, num_heads] = _indices(self.positions.to(device), num_heads)

    def place_alike(self, start: int, count: int, device: torch.device) -> None:
        """Set the positions at which `update` writes next: `count` entries, from the same position on in all rows. This
        is faster than `place`.
        """
        self.positions = torch.arange(start, start + count, device=device).unsqueeze(0)
        self._start = start

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values [B, heads, n, D] at the positions that were set. Returns the keys and values of the
        first `width` slots, [B, heads, width, D] each.

        The attention modules of transformers call this.
        """
        self._make_layer(layer_idx, (key_states, value_states))
        keys, values = self.buffers[layer_idx]
        return self._write(keys, key_states), self._write(values, value_states)

    def _make_layer(self, layer: int, states: tuple[Tensor, Tensor]) -> None:
        """Allocate a layer's buffers, for keys and values like these, unless they exist already."""
        if layer in self.buffers:
            return
        keys, values = [
            state.new_zeros(self.num_rows, state.shape[1], self.num_slots, state.shape[3])
            for state in states
        ]
        self.buffers[layer] = keys, values
        # The layers of a model may be on different devices, and may have different numbers of heads.
        for buffer in (keys, values):
            kind = (buffer.device, buffer.shape[1])
            if kind not in self._indices:
                self._indices[kind] = _indices(self.positions.to(buffer.device), buffer.shape[1])

    def _write(self, buffer: Tensor, states: Tensor) -> Tensor:
        """Write keys or values into the buffer of a layer, as `update` does."""
        num_rows, num_heads, num_tokens, _ = states.shape
        rows = buffer if num_rows == len(buffer) else buffer[:num_rows]
        if self._start is not None:
            rows.narrow(2, self._start, num_tokens).copy_(states)
            return rows.narrow(2, 0, self.width)
        indices = self._indices[states.device, num_heads]
        # This does not write through a view, because torch 2.11 would compile that to a copy of the whole buffer and
        # back.
        buffer.index_put_(indices, states)
        return rows.narrow(2, 0, self.width)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of earlier tokens, for models that make their own masks. If rows have different numbers,
        this returns 0, and the model is given a mask in its place.
        """
        return self._start or 0

    def get_mask_sizes(self, *_: Any, **__: Any) -> tuple[int, int]:
        """Return how many slots a mask covers, and the first of them, for masks that transformers makes."""
        return self.width, 0

    def causal_mask(self, window: int | None, dtype: torch.dtype, num_copies: int = 1) -> Tensor:
        """Return a mask [B or 1, 1, num_copies * n, width], to be added to attention scores. Each of the n entries that
        are written next sees itself and the entries before it, within the window.

        For entries at the positions 2 and 3, with width 5 and window 2, the two rows are [-, 0, 0, -, -] and
        [-, -, 0, 0, -], where - stands for the lowest number of `dtype`.

        Args:
            window: the sliding window in tokens; None without one.
            dtype: the dtype of the mask.
            num_copies: how many queries each entry has; more than 1 if heads are packed together (`HeadPacking`).
        """
        # A token's slot is its position, so slots can be compared with positions.
        queries = self.positions.repeat(1, num_copies).unsqueeze(2)
        slots = torch.arange(self.width, device=queries.device)
        is_seen = slots <= queries
        if window is not None:
            is_seen &= slots > queries - window
        return torch.where(is_seen.unsqueeze(1), 0.0, torch.finfo(dtype).min).to(dtype)

    def range_mask(self, first: Tensor, last: Tensor) -> Tensor:
        """Return a mask [B, 1, n, width] bool, in which each of n entries sees the slots from `first` [B, n] to `last`
        [B, n], both included.
        """
        slots = torch.arange(self.width, device=last.device)
        not_before = slots >= first.unsqueeze(-1)
        not_after = slots <= last.unsqueeze(-1)
        return (not_before & not_after).unsqueeze(1)


def _indices(written: Tensor, num_heads: int) -> _Indices:
    """Return the indices of rows, heads and slots for entries in the slots `written` [B, n]. The three tensors
    broadcast to [B, heads, n].
    """
    rows = torch.arange(len(written), device=written.device).view(-1, 1, 1)
    heads = torch.arange(num_heads, device=written.device).view(-1, 1)
    return rows, heads, written.unsqueeze(1)
