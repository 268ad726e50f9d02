"""A KV cache of fixed size.

A row's token at position p is in slot p of that row, independent of the other rows. So a roll-back
only changes the row's length, positions and sliding windows need no bookkeeping (a mask that
compares slots compares positions), and slots from a row's length on have no influence, and are
overwritten.
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
# Of each layer, [1 or more, heads, n, D] each.
KeysAndValues = Mapping[int, tuple[Tensor, Tensor]]


class SlotCache(Cache):
    """Keys and values of the layers of a model, or of a draft head: the entry at position p of a row is in slot p.

    Say a row has entries in the slots 0 to 4, and a pass writes three draft tokens to 5, 6 and 7. If the verdict
    accepts one of them, the next pass writes from 6 on. What is left in 7 is overwritten before any query may see it,
    so nothing is ever removed.

    Whoever makes a pass calls `place`. Then each layer calls `update`, and masks say which slots its queries see. The
    buffers may have more rows than the batch; `update` returns only the batch's.

    Attributes:
        num_rows: of the buffers, B.
        num_slots: of each row, S.
        width: the slots that `update` returns and masks cover, at least as many as are written.
        positions: [B or 1, n], the positions of the entries that `update` writes next.
        buffers: keys and values of each layer, [B, heads, S, D] each, made when they are first written. A head's slots
            are contiguous, which halves the time to read them from main memory.
    """

    is_compileable = False  # if it were, transformers would make a mask where none is needed

    def __init__(self, num_rows: int = 0, num_slots: int = 0) -> None:
        super().__init__(layers=[])  # it has buffers in place of transformers' layers
        self.num_rows = num_rows
        self.num_slots = num_slots
        self.width = num_slots
        self.positions = torch.empty(0, 0, dtype=torch.long)
        self.buffers: dict[int, tuple[Tensor, Tensor]] = {}
        # Where `update` writes: from one slot on in all rows, or by indices for each device and number of heads.
        self._start: int | None = None
        self._indices: dict[tuple[torch.device, int], _Indices] = {}

    def has_room(self, num_rows: int, num_slots: int) -> bool:
        return num_rows <= self.num_rows and num_slots <= self.num_slots

    def write(self, states: KeysAndValues, rows: Sequence[int], sources: Sequence[int]) -> None:
        """Copy keys and values into the first slots of some rows.

        Args:
            sources: the row among the states of each.
        """
        places: dict[torch.device, tuple[Tensor, Tensor]] = {}
        for layer, pair in states.items():
            self._make_layer(layer, pair)
            device = pair[0].device
            if device not in places:
                places[device] = to_device(rows, device), to_device(sources, device)
            there, here = places[device]
            for buffer, state in zip(self.buffers[layer], pair, strict=True):
                buffer[there, :, : state.shape[2]] = state[here]

    def place(self, starts: Tensor, count: int) -> None:
        """Make `update` write `count` entries of each row next, from position `starts` [B] on."""
        ahead = torch.arange(count, device=starts.device)
        self.positions = starts.unsqueeze(1) + ahead
        self._start = None
        # Before any layer, so that equal layers have equal code when they are compiled.
        for device, num_heads in self._indices:
            self._indices[device, num_heads] = _indices(self.positions.to(device), num_heads)

    def place_alike(self, start: int, count: int, device: torch.device) -> None:
        """Make `update` write `count` entries next, from the same position on in all rows, which is faster."""
        self.positions = torch.arange(start, start + count, device=device).unsqueeze(0)
        self._start = start

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values [B, heads, n, D], return those of the first slots [B, heads, width, D].

        transformers' attention calls it.
        """
        self._make_layer(layer_idx, (key_states, value_states))
        keys, values = self.buffers[layer_idx]
        return self._write(keys, key_states), self._write(values, value_states)

    def _make_layer(self, layer: int, states: tuple[Tensor, Tensor]) -> None:
        if layer in self.buffers:
            return
        keys, values = [
            state.new_zeros(self.num_rows, state.shape[1], self.num_slots, state.shape[3])
            for state in states
        ]
        self.buffers[layer] = keys, values
        # The layers of one model may be on several devices, and differ in their heads.
        for buffer in (keys, values):
            kind = (buffer.device, buffer.shape[1])
            if kind not in self._indices:
                self._indices[kind] = _indices(self.positions.to(buffer.device), buffer.shape[1])

    def _write(self, buffer: Tensor, states: Tensor) -> Tensor:
        num_rows, num_heads, num_tokens, _ = states.shape
        rows = buffer if num_rows == len(buffer) else buffer[:num_rows]
        if self._start is not None:
            rows.narrow(2, self._start, num_tokens).copy_(states)
            return rows.narrow(2, 0, self.width)
        indices = self._indices[states.device, num_heads]
        # Not through a view: compiled by torch 2.11 that copies the whole buffer, and all of it back.
        buffer.index_put_(indices, states)
        return rows.narrow(2, 0, self.width)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the tokens before these, for models that make a mask. Where rows differ they are
        given one.
        """
        return self._start or 0

    def get_mask_sizes(self, *_: Any, **__: Any) -> tuple[int, int]:
        return self.width, 0

    def causal_mask(self, window: int | None, dtype: torch.dtype, num_copies: int = 1) -> Tensor:
        """Return a mask [B or 1, 1, copies * n, width] that is added to scores: each entry that is written next sees
        nothing after it, within the window.

        Args:
            num_copies: how many queries each entry is.
        """
        # A token's slot is its position, so slots are compared as positions.
        queries = self.positions.repeat(1, num_copies).unsqueeze(2)
        slots = torch.arange(self.width, device=queries.device)
        is_seen = slots <= queries
        if window is not None:
            is_seen &= slots > queries - window
        return torch.where(is_seen.unsqueeze(1), 0.0, torch.finfo(dtype).min).to(dtype)

    def range_mask(self, first: Tensor, last: Tensor) -> Tensor:
        """Return a mask [B, 1, n, width] of the slots from `first` to `last` [B, n] of each entry."""
        slots = torch.arange(self.width, device=last.device)
        not_before = slots >= first.unsqueeze(-1)
        not_after = slots <= last.unsqueeze(-1)
        return (not_before & not_after).unsqueeze(1)


def _indices(written: Tensor, num_heads: int) -> _Indices:
    """Return indices of rows, heads and slots, together [B, heads, n], for entries in slots [B, n]."""
    rows = torch.arange(len(written), device=written.device).view(-1, 1, 1)
    heads = torch.arange(num_heads, device=written.device).view(-1, 1)
    return rows, heads, written.unsqueeze(1)
