"""A KV cache of fixed size, and how an unmodified transformers model runs over it.

A row's token at position p is in slot p of that row, independent of the other rows. So a roll-back only changes the
row's length, positions and sliding windows need no bookkeeping (a mask that compares slots compares positions), and
slots from a row's length on have no influence, and are overwritten.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, GenerationMixin, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from harness.runners.attention import PACKED, PLAIN, pack_heads
from harness.runners.base import Options, run_model

# Layer types whose masks `SlotForward` makes, by their names in transformers' configurations.
_FULL, _SLIDING = "full_attention", "sliding_attention"


class UnsupportedModelError(RuntimeError):
    """A model that needs the eager runner. The message says why and completes a sentence that begins with its name."""


@dataclass(frozen=True)
class Slots:
    """For B rows of S slots, the keys and the values of each layer in turn, [B * S, heads, D] each.

    Attention reads the first `num_seen` slots of each row; None for all of them.
    """

    buffers: list[Tensor]
    num_rows: int
    num_slots: int
    num_seen: int | None = None

    @classmethod
    def like(cls, states: Sequence[Tensor], num_rows: int, num_slots: int) -> Slots:
        """Empty buffers for keys and values such as these, [..., heads, D]."""
        buffers = [state.new_zeros(num_rows * num_slots, *state.shape[-2:]) for state in states]
        return cls(buffers, num_rows, num_slots)

    @property
    def by_row(self) -> list[Tensor]:
        """The buffers as [B, S, heads, D]."""
        return [buffer.view(self.num_rows, self.num_slots, *buffer.shape[1:]) for buffer in self.buffers]

    @property
    def width(self) -> int:
        """Slots of a row that attention reads."""
        return self.num_slots if self.num_seen is None else self.num_seen

    def first_rows(self, num_rows: int) -> Slots:
        """The same memory, of the first rows only."""
        if num_rows == self.num_rows:
            return self
        return replace(
            self, buffers=[buffer[: num_rows * self.num_slots] for buffer in self.buffers], num_rows=num_rows
        )

    def write(self, states: Sequence[Tensor]) -> None:
        """Copy states [1 or B, n, heads, D] into the first n slots of all rows."""
        for buffer, new in zip(self.by_row, states, strict=True):
            buffer[:, : new.shape[1]] = new

    def select(self, rows: Tensor, num_used: int) -> None:
        """Move these rows [B or fewer] to the front, in this order, the first `num_used` slots of each."""
        for buffer in self.by_row:
            buffer[: len(rows), :num_used] = buffer[:, :num_used][rows.to(buffer.device)]


class _SlotLayer(CacheLayerMixin):
    """One layer's buffers [B * S, heads, D] as transformers expects them, for one forward pass.

    `places` are where the n new tokens of each row go: indices [B * n], or the slots that are the same in all rows.
    """

    is_compileable = False  # if it were, transformers would make a mask where none is needed
    is_sliding = False

    def __init__(self, keys: Tensor, values: Tensor, places: Tensor | slice, slots: Slots) -> None:
        super().__init__()
        self.keys, self.values = self._buffers = keys, values
        self._places, self._slots = places, slots
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the buffers exist."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """States [B, heads, n, D] of new tokens -> those of all slots that are seen, [B, heads, S, D] each."""
        keys, values = self._buffers
        return self._write(keys, key_states), self._write(values, value_states)

    def _write(self, buffer: Tensor, states: Tensor) -> Tensor:
        slots, shape = self._slots, buffer.shape[1:]
        if isinstance(self._places, slice):
            # One view instead of three: in a small model their number counts.
            strides = slots.num_slots * shape.numel(), shape[1], shape.numel(), 1
            first, num_rows, width = self._places.start, slots.num_rows, slots.width
            new = buffer.as_strided((num_rows, shape[0], states.shape[2], shape[1]), strides, first * shape.numel())
            new.copy_(states)
            return buffer.as_strided((num_rows, shape[0], width, shape[1]), strides)
        buffer.index_copy_(0, self._places, states.transpose(1, 2).flatten(0, 1))
        return buffer.view(slots.num_rows, -1, *shape)[:, : slots.width].transpose(1, 2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_max_length(), 0

    def get_max_length(self) -> int:
        return self._slots.width

    get_max_cache_shape = get_max_length

    def get_seq_length(self) -> int:
        """Not defined, because rows differ; never used, because positions and masks are given explicitly."""
        return 0


class SlotForward:
    """A forward pass over slots, as a function of tensors alone, so that it can be compiled and captured.

    Raises UnsupportedModelError if positions or masks cannot be given to the model explicitly.
    """

    def __init__(self, model: PreTrainedModel, options: Options) -> None:
        self._model, self._options = model, options
        self._windows = _windows(model)
        self._heads_per_key = pack_heads(model)
        attention = model.config.get_text_config()._attn_implementation
        self._needs_masks = attention not in (PLAIN, PACKED) or any(self._windows.values())
        self._identity = f"{type(model).__name__} {model.config.to_json_string()}"

    def __call__(
        self, slots: Slots, tokens: Tensor, starts: Tensor | int, num_real: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Write tokens [B, n] into the slots from starts [B] on; returns what `run_model` does.

        Args:
            starts: a number where it is the same for all rows, which is faster.
            num_real: [], only so many of the n tokens count. The others fill the shape up and take the position of the
                last one that counts, so that no position is outside of the model's context. None: all.
        """
        # The compiler treats values from the configuration as constants. It checks what is read here, and so does not
        # take one model's code for another of the same sizes.
        assert self._identity
        (num_rows, num_tokens), device = tokens.shape, tokens.device
        places: dict[torch.device, Tensor] | slice
        if isinstance(starts, int):
            written = torch.arange(starts, starts + num_tokens, device=device).unsqueeze(0)
            places = slice(starts, starts + num_tokens)
        else:
            written = starts.unsqueeze(1) + torch.arange(num_tokens, device=device)
            first = torch.arange(num_rows, device=device).unsqueeze(1) * slots.num_slots
            # The layers of one model may be on several devices.
            indices = (first + written).flatten()
            places = {device: indices.to(device) for device in {buffer.device for buffer in slots.buffers}}
        # A single query sees all slots that attention reads, unless rows differ, and kernels are faster without a mask.
        needs_masks = self._needs_masks or num_tokens > 1 or not isinstance(starts, int)
        positions = written if num_real is None else torch.minimum(written, written[:, :1] + num_real - 1)
        pairs = zip(slots.buffers[::2], slots.buffers[1::2], strict=True)
        return run_model(
            self._model,
            self._options,
            tokens,
            Cache(
                layers=[
                    _SlotLayer(keys, values, places if isinstance(places, slice) else places[keys.device], slots)
                    for keys, values in pairs
                ]
            ),
            attention_mask=self._masks(written, slots) if needs_masks else None,
            position_ids=positions,
        )

    def _masks(self, written: Tensor, slots: Slots) -> Tensor | dict[str, Tensor]:
        """Additive masks [1 or B, 1, n, S] for queries in the slots `written` [1 or B, n], one per type of layer.

        Where heads are packed, there are n queries for each head that shares its keys.
        """
        queries, dtype = written.repeat(1, self._heads_per_key)[:, None, :, None], slots.buffers[0].dtype
        index = torch.arange(slots.width, device=written.device)
        masks = {}
        for name, window in self._windows.items():
            seen = index <= queries
            if window is not None:
                seen = seen & (index > queries - window)
            masks[name] = torch.where(seen, 0.0, torch.finfo(dtype).min).to(dtype)
        return masks.pop("") if "" in masks else masks


def _windows(model: PreTrainedModel) -> dict[str, int | None]:
    """The sliding window of each type of layer, None without one; under the name "" if the model takes a single mask.

    Mirrors how `generate` chooses masks for static caches, `transformers.masking_utils.create_masks_for_generate`.
    """
    config = model.config.get_text_config()
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise UnsupportedModelError("takes no positions")
    if getattr(config, "alibi", False):
        raise UnsupportedModelError("reads positions from its mask (ALiBi)")
    own = getattr(type(model), "create_masks_for_generate", None)
    if own is not getattr(GenerationMixin, "create_masks_for_generate", None):
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


def lay_out_for_few_tokens(model: nn.Module) -> None:
    """Store the weights of linear layers with the input dimension first, their values and shapes unchanged.

    On a CPU a product of few float32 rows takes up to 1.5 times as long with a transposed matrix. Weights that are
    shared with an embedding stay as they are.
    """
    embedded = {module.weight.data_ptr() for module in model.modules() if isinstance(module, nn.Embedding)}
    for module in model.modules():
        if type(module) is not nn.Linear or module.weight.data_ptr() in embedded:
            continue
        weight = module.weight.data
        if weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.is_contiguous():
            module.weight.data = weight.t().contiguous().t()
