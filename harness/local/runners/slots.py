"""A KV cache of fixed size, and how an unmodified transformers model runs over it.

A row's token at position p is in slot p of that row, independent of the other rows. So a roll-back
only changes the row's length, positions and sliding windows need no bookkeeping (a mask that
compares slots compares positions), and slots from a row's length on have no influence, and are
overwritten.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import Cache, GenerationMixin, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from harness.local.models.cache_names import cache_name
from harness.local.runners.base import Options, captured, capturing, clamp_positions, context_of

# Names of attention in transformers: torch's own, and `packed_attention`.
_PLAIN = "sdpa"
_PACKED = "sdpa_packed"

# Layer types whose masks `SlotForward` makes, by their names in transformers' configurations.
_FULL = "full_attention"
_SLIDING = "sliding_attention"

# How many slots beyond the needed ones are allocated when a cache grows.
SPARE_SLOTS = 256


class UnsupportedModelError(RuntimeError):
    """A model that needs a plainer runner, or can have none. The message says why and completes a
    sentence that begins with its name.
    """


# Where the n new tokens of each row go. A number: into the n slots from there on, in every row.
# Otherwise indices of rows, heads and slots, for each device and number of heads among the layers.
_Targets = int | dict[tuple[torch.device, int], tuple[Tensor, Tensor, Tensor]]


@dataclass
class _Pass:
    """A forward pass over slots, as all layers need to know it.

    Attributes:
        targets: where it writes.
        width: how many slots of each row attention reads.
    """

    targets: _Targets = 0
    width: int = 0


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

    @cached_property
    def positions(self) -> Tensor:
        """The positions of all slots, [1, S]."""
        return torch.arange(self.num_slots, device=self.buffers[0].device).unsqueeze(0)

    @cached_property
    def reused(self) -> tuple[Cache, _Pass]:
        """A cache that eager passes share, one after the other, and the pass that it is set to."""
        of_pass = _Pass()
        return self.cache(of_pass), of_pass

    def cache(self, of_pass: _Pass) -> Cache:
        """Show the slots to transformers."""
        pairs = zip(self.buffers[::2], self.buffers[1::2], strict=True)
        layers: list[Any] = [_SlotLayer(keys, values, of_pass) for keys, values in pairs]
        return Cache(layers=layers)

    def have_room(self, num_rows: int, num_slots: int) -> bool:
        return num_rows <= self.num_rows and num_slots <= self.num_slots

    def enlarged(self, num_rows: int, num_slots: int) -> Slots:
        """Return a copy with at least these numbers of rows and slots; new ones are zero."""
        enlarged = self.like(
            self.buffers, max(num_rows, self.num_rows), max(num_slots, self.num_slots)
        )
        enlarged.write(self.buffers)
        return enlarged

    def first_rows(self, num_rows: int) -> Slots:
        """Return the first rows, in the same memory."""
        if num_rows == self.num_rows:
            return self
        return Slots([buffer[:num_rows] for buffer in self.buffers])

    def write(self, states: Sequence[Tensor], first_row: int = 0) -> None:
        """Copy states [n, heads, m, D] into the first m slots of n rows."""
        for buffer, state in zip(self.buffers, states, strict=True):
            buffer[first_row : first_row + len(state), :, : state.shape[2]] = state

    def zero_nan(self) -> None:
        """Zero what is not finite, in place."""
        for buffer in self.buffers:
            buffer.nan_to_num_(0.0, 0.0, 0.0)

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

    def __init__(self, keys: Tensor, values: Tensor, of_pass: _Pass) -> None:
        # The base class would set them to None.
        self.keys = keys
        self.values = values
        self._pass = of_pass

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the buffers exist."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write states [B, heads, n, D] of new tokens -> the states of all slots that are seen, [B,
        heads, S, D].
        """
        return self._write(self.keys, key_states), self._write(self.values, value_states)

    def _write(self, buffer: Tensor, states: Tensor) -> Tensor:
        targets = self._pass.targets
        if isinstance(targets, int):
            buffer.narrow(2, targets, states.shape[2]).copy_(states)
        else:
            # Not through a view: compiled by torch 2.11 that copies the whole buffer, and all of it
            # back.
            buffer.index_put_(targets[buffer.device, buffer.shape[1]], states)
        return buffer.narrow(2, 0, self._pass.width)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._pass.width, 0

    def get_max_length(self) -> int:
        return self._pass.width

    get_max_cache_shape = get_max_length

    def get_seq_length(self) -> int:
        """Return the tokens before these, for models that make a mask. Where rows differ they are
        given one.
        """
        targets = self._pass.targets
        return targets if isinstance(targets, int) else 0


class HeadPacking:
    """Within its `with` block a model whose heads share keys takes masks [1 or B, 1, heads per key
    * n, S] for n queries: heads that share their keys count as more queries of one head.

    transformers copies keys and values for each such head wherever there are a mask and several
    queries. Over a long context that takes longer than the attention itself, and every kernel
    computes the same without.

    With 8 heads on 2 keys and 5 tokens, attention gets 20 queries for each of 2 heads instead of 5
    queries for each of 8. Outside the block the model is as it was.

    Attributes:
        heads_per_key: 1 if they share none.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.heads_per_key = 1
        groups = {getattr(module, "num_key_value_groups", None) for module in model.modules()}
        groups.discard(None)
        is_plain = model.config.get_text_config()._attn_implementation == _PLAIN
        configs: dict[int, Any] = {}
        if is_plain and len(groups) == 1:
            self.heads_per_key = int(groups.pop())  # type: ignore[arg-type]
        if self.heads_per_key > 1:
            for module in model.modules():
                config = getattr(module, "config", None)
                if config is not None:
                    configs[id(config)] = vars(config)
        self._configs = list(configs.values())
        ALL_ATTENTION_FUNCTIONS.register(_PACKED, packed_attention)
        ALL_MASK_ATTENTION_FUNCTIONS.register(_PACKED, ALL_MASK_ATTENTION_FUNCTIONS[_PLAIN])

    def __enter__(self) -> None:
        self._set_attention(_PACKED)

    def __exit__(self, *_: object) -> None:
        self._set_attention(_PLAIN)

    def _set_attention(self, name: str) -> None:
        for config in self._configs:
            # The property would also set it for configurations inside, which may have other users, and
            # huggingface_hub's attributes check each value.
            config["_attn_implementation_internal"] = name


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend from queries [B, heads, n, D] to keys and values [B, key heads, S, D] -> [B, n, heads,
    D].
    """
    num_rows, num_heads, num_queries, size = query.shape
    num_key_heads = key.shape[1]
    num_packed = num_heads // num_key_heads * num_queries
    # Without a mask several queries are a prompt's, each of which sees those before it.
    is_single = attention_mask is None and num_queries == 1
    has_packed_mask = attention_mask is not None and attention_mask.shape[-2] == num_packed
    has_bias = any(options.get(name) is not None for name in ("position_bias", "softcap"))
    if has_bias or not (is_single or has_packed_mask):
        if attention_mask is not None:
            # Of a mask for packed queries, those of one head: all heads see the same slots.
            attention_mask = attention_mask[:, :, :num_queries]
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **options
        )
    query = query.reshape(num_rows, num_key_heads, num_packed, size)
    output = scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, scale=scaling
    )
    # Kernels on a GPU leave the heads behind the queries in memory, so that these two are split
    # before they are joined.
    output = output.view(num_rows, num_key_heads, -1, num_queries, output.shape[-1]).permute(
        0, 3, 1, 2, 4
    )
    return output.reshape(num_rows, num_queries, num_heads, -1), None


class SlotForward:
    """Runs a model over slots, as a function of tensors alone, so that it can be compiled. Every
    call stands in a `with` block of `packing`.

    Raises UnsupportedModelError if positions or masks cannot be given to the model explicitly.
    """

    def __init__(self, model: PreTrainedModel, options: Options) -> None:
        self.packing = HeadPacking(model)
        self._model = model
        self._options = options
        self._windows = attention_windows(model)
        self._context = context_of(model)
        self._cache_name = cache_name(model)
        self._constant_arguments = {"use_cache": True, **capturing(options)}
        attention = model.config.get_text_config()._attn_implementation
        self._needs_masks = attention != _PLAIN or any(self._windows.values())

    def __call__(
        self, slots: Slots, width: int, tokens: Tensor, starts: Tensor | int
    ) -> tuple[Tensor, ...]:
        """Write tokens [B, n] into the slots from starts [B] on; returns what `captured` does.

        Args:
            width: how many slots of each row attention reads.
            starts: a number where it is the same for all rows, which is faster. A single token
                then has no mask, so that `width` must be `starts + 1`.
        """
        num_tokens = tokens.shape[1]
        device = tokens.device
        # Kernels are faster without a mask. A single token needs none where all rows are equally
        # long: it sees all slots that attention reads.
        needs_masks = self._needs_masks or num_tokens > 1
        if isinstance(starts, int):
            written = slots.positions[:, starts : starts + num_tokens].to(device)
            cache, of_pass = slots.reused
            of_pass.targets = starts
            of_pass.width = width
        else:
            written = starts.unsqueeze(1) + torch.arange(num_tokens, device=device)
            # The layers of one model may be on several devices, and differ in their heads.
            kinds = {(buffer.device, buffer.shape[1]) for buffer in slots.buffers}
            targets = {
                (device, num_heads): _indices(written.to(device), num_heads)
                for device, num_heads in kinds
            }
            cache = slots.cache(_Pass(targets, width))
            needs_masks = True
        masks = None
        if needs_masks:
            masks = self._masks(starts, written, width, slots.buffers[0].dtype)
        output = self._model(
            input_ids=tokens,
            attention_mask=masks,
            position_ids=clamp_positions(written, width, self._context),
            **{self._cache_name: cache},
            **self._constant_arguments,
        )
        return captured(self._options, output)

    def _masks(
        self, starts: Tensor | int, written: Tensor, width: int, dtype: torch.dtype
    ) -> Tensor | dict[str, Tensor]:
        """Make masks [1 or B, 1, n, S] that are added to scores, for tokens in slots written [1 or
        B, n]: one for each type of layer, or a single one where all layers share it.

        Where heads are packed (`HeadPacking`), each token is as many queries as heads share a key.
        """
        hidden = torch.finfo(dtype).min
        num_heads = self.packing.heads_per_key
        if isinstance(starts, int) and not any(self._windows.values()):
            # As below, with a third of the host's work.
            shape = (num_heads, written.shape[1], width)
            mask = torch.full(shape, hidden, dtype=dtype, device=written.device).triu_(starts + 1)
            masks = dict.fromkeys(self._windows, mask.view(1, 1, -1, width))
            return masks.get("", masks)
        # A token's slot is its position, so slots are compared as positions.
        queries = written.repeat(1, num_heads).unsqueeze(2)
        positions = torch.arange(width, device=written.device)
        seen = positions <= queries
        masks = {}
        for name, window in self._windows.items():
            visible = seen if window is None else seen & (positions > queries - window)
            masks[name] = torch.where(visible.unsqueeze(1), 0.0, hidden).to(dtype)
        return masks.get("", masks)


def _indices(written: Tensor, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return indices of rows, heads and slots, together [B, heads, n], for entries in slots [B, n]."""
    rows = torch.arange(len(written), device=written.device).view(-1, 1, 1)
    heads = torch.arange(num_heads, device=written.device).view(-1, 1)
    return rows, heads, written.unsqueeze(1)


def attention_windows(model: PreTrainedModel) -> dict[str, int | None]:
    """Return the sliding window of each type of layer, None without one; under the name "" where
    all share a mask.

    Raises UnsupportedModelError for a model that makes its own masks or positions.

    Mirrors how `generate` chooses masks for static caches,
    `transformers.masking_utils.create_masks_for_generate`.
    """
    config = model.config.get_text_config()
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise UnsupportedModelError("takes no positions")
    if getattr(config, "alibi", False):
        raise UnsupportedModelError("reads positions from its mask (ALiBi)")
    makes_masks = getattr(type(model), "create_masks_for_generate", None)
    if makes_masks is not getattr(GenerationMixin, "create_masks_for_generate", None):
        raise UnsupportedModelError("makes its own masks")
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if types is None:
        if getattr(config, "attention_chunk_size", None) is not None:
            raise UnsupportedModelError("attends in chunks")
        return {"": window}
    if unknown := set(types) - {_FULL, _SLIDING}:
        raise UnsupportedModelError(f"has layers of type {', '.join(sorted(unknown))}")
    return {name: window if name == _SLIDING else None for name in sorted(set(types))}


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
        # Into the whole buffer: a compiler would copy a view such as `buffer[:num_rows]`.
        buffer.index_put_(_indices(self.positions, num_heads), states)
        return buffer[:num_rows, :, : self.num_slots]

    def zero_nan(self) -> None:
        """Zero what is not finite, in place."""
        for slots in self._layers.values():
            slots.zero_nan()

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

    @property
    def numbers_per_token(self) -> int:
        """How many numbers, keys and values of all layers, one entry has."""
        return sum(buffer.shape[1] * buffer.shape[3] for buffer in self.buffers)

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
