"""A KV cache of fixed size.

A row's token at position p is in slot p of that row, independent of the other rows. So a roll-back
only changes the row's length, positions and sliding windows need no bookkeeping (a mask that
compares slots compares positions), and slots from a row's length on have no influence, and are
overwritten.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from harness.local.decoding.iteration import with_room

# How many slots beyond the needed ones are allocated when a cache grows.
SPARE_SLOTS = 256

# Indices of rows, heads and slots.
_Indices = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Slots:
    """Keys and values of B rows of S slots.

    Attributes:
        buffers: in turn the keys and the values of each layer, [B, heads, S, D] each. A head's
            slots are contiguous, which halves the time to read them from main memory.
    """

    buffers: list[Tensor]

    @classmethod
    def like(cls, states: Sequence[Tensor], num_rows: int, num_slots: int) -> Slots:
        """Allocate empty buffers for keys and values such as these, [1 or more, heads, n, D]."""
        buffers: list[Tensor] = []
        for state in states:
            _, num_heads, _, size = state.shape
            buffers.append(state.new_zeros(num_rows, num_heads, num_slots, size))
        return cls(buffers)

    @cached_property
    def num_rows(self) -> int:
        return self.buffers[0].shape[0] if self.buffers else 0

    @cached_property
    def num_slots(self) -> int:
        return self.buffers[0].shape[2] if self.buffers else 0

    def cache(self, places: int | Tensor, width: int) -> Cache:
        """Show `width` slots to transformers, which writes every row from one slot on, or into slots [B, n]."""
        indices: dict[tuple[torch.device, int], _Indices] = {}
        layers: list[Any] = []
        for keys, values in zip(self.buffers[::2], self.buffers[1::2], strict=True):
            if isinstance(places, int):
                layers.append(_SlotLayer(keys, values, places, width))
                continue
            # The layers of one model may be on several devices, and differ in their heads.
            kind = (keys.device, keys.shape[1])
            if kind not in indices:
                indices[kind] = _indices(places.to(keys.device), keys.shape[1])
            layers.append(_SlotLayer(keys, values, indices[kind], width))
        return Cache(layers=layers)

    def have_room(self, num_rows: int, num_slots: int) -> bool:
        return num_rows <= self.num_rows and num_slots <= self.num_slots

    def enlarged(self, num_rows: int, num_slots: int) -> Slots:
        """Return a copy with at least these numbers of rows and slots; new ones are zero."""
        return Slots([with_room(buffer, num_rows, 0, num_slots) for buffer in self.buffers])

    def write(self, states: Sequence[Tensor], first_row: int = 0) -> None:
        """Copy states [n, heads, m, D] into the first m slots of n rows."""
        for buffer, state in zip(self.buffers, states, strict=True):
            buffer[first_row : first_row + len(state), :, : state.shape[2]] = state

    def select(self, rows: Tensor, num_used: int) -> None:
        """Copy the first `num_used` slots of these rows [n] to the first n rows."""
        for buffer in self.buffers:
            used = buffer[:, :, :num_used]
            used[: len(rows)] = used[rows.to(buffer.device)]


class _SlotLayer(CacheLayerMixin):
    """Shows one layer's buffers [B, heads, S, D] to transformers."""

    is_compileable = False  # if it were, transformers would make a mask where none is needed
    is_sliding = False
    is_initialized = True
    keys: Tensor
    values: Tensor

    def __init__(self, keys: Tensor, values: Tensor, places: int | _Indices, width: int) -> None:
        # The base class would set them to None.
        self.keys = keys
        self.values = values
        self._places = places
        self._width = width

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the buffers exist."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write states [B, heads, n, D] of new tokens -> the states of all slots that are seen, [B,
        heads, S, D].
        """
        keys = _write(self.keys, key_states, self._places, self._width)
        return keys, _write(self.values, value_states, self._places, self._width)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._width, 0

    def get_max_length(self) -> int:
        return self._width

    get_max_cache_shape = get_max_length

    def get_seq_length(self) -> int:
        """Return the tokens before these, for models that make a mask. Where rows differ they are
        given one.
        """
        return self._places if isinstance(self._places, int) else 0


def _write(buffer: Tensor, states: Tensor, places: int | _Indices, width: int) -> Tensor:
    """Write states [n, heads, m, D] of new tokens into the first n rows of a buffer -> what attention
    reads of these rows, [n, heads, width, D].

    Args:
        places: the slot of each row's first new token if it is the same, or indices.
    """
    num_rows, _, num_tokens, _ = states.shape
    rows = buffer if num_rows == len(buffer) else buffer[:num_rows]
    if isinstance(places, int):
        rows.narrow(2, places, num_tokens).copy_(states)
    else:
        # Not through a view: compiled by torch 2.11 that copies the whole buffer, and all of it back.
        buffer.index_put_(places, states)
    return rows.narrow(2, 0, width)


def _indices(written: Tensor, num_heads: int) -> _Indices:
    """Return indices of rows, heads and slots, together [B, heads, n], for entries in slots [B, n]."""
    rows = torch.arange(len(written), device=written.device).view(-1, 1, 1)
    heads = torch.arange(num_heads, device=written.device).view(-1, 1)
    return rows, heads, written.unsqueeze(1)


class SlotCache:
    """Keys and values of a draft head's layers: the entry at position p of a row is in slot p.

    Say a row has entries in the slots 0 to 4, and a proposal writes three drafted tokens to 5, 6 and
    7. If the verdict accepts one of them, the next proposal writes from 6 on. What is left in 7 is
    overwritten before any query may see it, so nothing is ever removed.

    A head's drafter calls `place`, and then the head's layers call `update` and ask for a mask of
    the slots that each query sees. The buffers may have more rows than the batch; `update` returns
    only the batch's.

    Attributes:
        positions: [B, n], the positions of the entries that `update` writes next.
        num_slots: the number of slots S that `update` returns and masks cover, at least as many as
            are written. The drafter sets it once for a whole proposal: `place` cannot know it, as
            `starts` is on the device, and compiled proposals need a fixed S.
        first_row: from which on `update` writes, because rows join behind others.
    """

    def __init__(self) -> None:
        self.positions = torch.empty(0, dtype=torch.long)
        self.num_slots = 0
        self.first_row = 0
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
        num_rows = self.first_row + len(keys)
        if not slots.have_room(num_rows, self.num_slots):
            slots = slots.enlarged(num_rows, self.num_slots + SPARE_SLOTS)
            self._layers[layer] = slots
        all_keys, all_values = slots.buffers
        if self.first_row:
            all_keys, all_values = all_keys[self.first_row :], all_values[self.first_row :]
        indices = _indices(self.positions, keys.shape[1])
        written_keys = _write(all_keys, keys, indices, self.num_slots)
        return written_keys, _write(all_values, values, indices, self.num_slots)

    def select(self, rows: Tensor, num_rows: int) -> None:
        """Move these rows to the front, in this order.

        Args:
            num_rows: of the batch; rows that have just joined, no `update` has written yet.
        """
        for layer, slots in self._layers.items():
            if slots.num_rows < num_rows:
                slots = self._layers[layer] = slots.enlarged(num_rows, 0)
            slots.select(rows, slots.num_slots)

    def copied(self) -> SlotCache:
        """Return a cache over the same buffers; where it grows, this one does not."""
        copied = copy.copy(self)
        copied._layers = dict(self._layers)
        return copied

    @property
    def buffers(self) -> list[Tensor]:
        """The keys and values of all layers, as they are now: a cache that grows has others."""
        return [buffer for slots in self._layers.values() for buffer in slots.buffers]

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
