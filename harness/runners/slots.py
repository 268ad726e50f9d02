"""A KV cache of fixed size: what one forward pass of an unmodified transformers model writes and reads there.

A row's token at position p lies in slot p of that row, whatever the other rows hold. So a roll-back only moves the
row's length, positions and sliding windows need no bookkeeping (a mask that compares slots compares positions), and
what lies behind a row's length is never seen, only overwritten.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, GenerationMixin, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

# Layer types whose masks `SlotForward` makes, by their names in transformers' configurations.
_FULL, _SLIDING = "full_attention", "sliding_attention"


class UnsupportedModelError(RuntimeError):
    """A model that needs the eager runner; the message says why, as the end of a sentence that begins with its name."""


@dataclass(frozen=True)
class Slots:
    """Buffers of all layers, keys and values [B * S, heads, D] each, for B rows of S slots."""

    keys: list[Tensor]
    values: list[Tensor]
    num_rows: int
    num_slots: int

    @classmethod
    def like(cls, states: Sequence[tuple[Tensor, Tensor]], num_rows: int, num_slots: int) -> Slots:
        """Empty buffers for keys and values such as these of each layer, [B, heads, n, D] each."""

        def empty(states: Tensor) -> Tensor:
            _, num_heads, _, dimension = states.shape
            return states.new_zeros(num_rows * num_slots, num_heads, dimension)

        keys, values = [empty(keys) for keys, _ in states], [empty(values) for _, values in states]
        return cls(keys, values, num_rows, num_slots)

    @property
    def buffers(self) -> list[Tensor]:
        return self.keys + self.values

    def first_rows(self, num_rows: int) -> Slots:
        """The same memory, of the first rows only."""
        if num_rows == self.num_rows:
            return self
        end = num_rows * self.num_slots
        keys, values = [states[:end] for states in self.keys], [states[:end] for states in self.values]
        return Slots(keys, values, num_rows, self.num_slots)

    def read(self, layers: list[Any]) -> None:
        """Copy from layers with `keys` and `values` [1 or B, heads, n, D] into the first n slots of all rows."""
        states = [layer.keys for layer in layers] + [layer.values for layer in layers]
        for buffer, new in zip(self.buffers, states, strict=True):
            self._by_row(buffer)[:, : new.shape[2]] = new.transpose(1, 2)

    def copied_to(self, num_slots: int) -> Slots:
        """The same rows in buffers of more slots."""
        larger = Slots([], [], self.num_rows, num_slots)
        for old, new in ((self.keys, larger.keys), (self.values, larger.values)):
            for states in old:
                new.append(states.new_zeros(self.num_rows * num_slots, *states.shape[1:]))
                larger._by_row(new[-1])[:, : self.num_slots] = self._by_row(states)
        return larger

    def select(self, rows: Tensor) -> None:
        """Move these rows [B or fewer] to the front, in this order."""
        for buffer in self.buffers:
            by_row = self._by_row(buffer)
            by_row[: len(rows)] = by_row[rows]

    def _by_row(self, states: Tensor) -> Tensor:
        return states.view(self.num_rows, self.num_slots, *states.shape[1:])


class _SlotLayer(CacheLayerMixin):
    """One layer's buffers as transformers wants to see them, for one forward pass that writes at given slots.

    Args:
        keys, values: [B * S, heads, D].
        indices: [B * n], where the n new tokens of each row go.
        num_rows: B.
    """

    is_compileable = True
    is_sliding = False

    def __init__(self, keys: Tensor, values: Tensor, indices: Tensor, num_rows: int) -> None:
        super().__init__()
        self.keys, self.values = self._buffers = keys, values
        self._indices, self._num_rows = indices, num_rows
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: the buffers are there."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """States [B, heads, n, D] of new tokens -> those of all slots, [B, heads, S, D] each."""
        keys, values = self._buffers
        return self._write(keys, key_states), self._write(values, value_states)

    def _write(self, buffer: Tensor, states: Tensor) -> Tensor:
        buffer.index_copy_(0, self._indices, states.transpose(1, 2).flatten(0, 1))
        return buffer.view(self._num_rows, -1, *buffer.shape[1:]).transpose(1, 2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_max_length(), 0

    def get_max_length(self) -> int:
        return self._buffers[0].shape[0] // self._num_rows

    def get_max_cache_shape(self) -> int:
        return self.get_max_length()

    def get_seq_length(self) -> int:
        """Rows differ, so there is none; positions and masks are given explicitly, and nobody should need it."""
        return 0


class SlotForward:
    """A forward pass over slots, as a function of tensors alone: what can be compiled and captured.

    Args:
        vocabulary_size: logits are cut to this width.

    Raises:
        UnsupportedModelError: if positions or masks cannot be given to the model explicitly.
    """

    def __init__(self, model: PreTrainedModel, vocabulary_size: int | None) -> None:
        self._model = model
        self._vocabulary_size = vocabulary_size
        self._windows = _windows(model)
        self._identity = f"{type(model).__name__} {model.config.to_json_string()}"

    def __call__(self, slots: Slots, tokens: Tensor, starts: Tensor, num_real: Tensor) -> Tensor:
        """Write tokens [B, n] into the slots from starts [B] on -> logits [B, n, V].

        Args:
            num_real: [] how many of the n tokens count; what follows fills the shape up and takes the position of the
                last one, so that no position lies outside of the model's context.
        """
        # What a compiler takes for constant is in the configuration. It checks what is read here, and so does not take
        # one model's code for another of the same sizes.
        assert self._identity
        num_rows, num_tokens = tokens.shape
        steps = torch.arange(num_tokens, device=tokens.device)
        written = starts.unsqueeze(1) + steps
        first = torch.arange(num_rows, device=tokens.device).unsqueeze(1) * slots.num_slots
        indices = (first + written).flatten()
        pairs = zip(slots.keys, slots.values, strict=True)
        cache = Cache(layers=[_SlotLayer(keys, values, indices, num_rows) for keys, values in pairs])
        logits = self._model(
            input_ids=tokens,
            attention_mask=self._masks(written, slots),
            position_ids=starts.unsqueeze(1) + torch.minimum(steps, num_real - 1),
            past_key_values=cache,
            use_cache=True,
        ).logits
        return logits[..., : self._vocabulary_size]

    def _masks(self, written: Tensor, slots: Slots) -> Tensor | dict[str, Tensor]:
        """Additive masks [B, 1, n, S] for queries in the slots `written` [B, n], one for each type of layer."""
        queries = written[:, None, :, None]
        index = torch.arange(slots.num_slots, device=written.device)
        masks = {}
        for name, window in self._windows.items():
            seen = index <= queries
            if window is not None:
                seen = seen & (index > queries - window)
            dtype = slots.keys[0].dtype
            masks[name] = torch.where(seen, 0.0, torch.finfo(dtype).min).to(dtype)
        return masks.pop("") if "" in masks else masks


def _windows(model: PreTrainedModel) -> dict[str, int | None]:
    """The sliding window of each type of layer, None without one; under the name "" where a model takes one mask only.

    Mirrors how `generate` chooses masks for static caches, `transformers.masking_utils.create_masks_for_generate`.
    """
    config = model.config.get_text_config()
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise UnsupportedModelError("takes no positions")
    if getattr(config, "alibi", False):
        raise UnsupportedModelError("reads positions off its mask (ALiBi)")
    own = getattr(type(model), "create_masks_for_generate", None)
    if own is not getattr(GenerationMixin, "create_masks_for_generate", None):
        raise UnsupportedModelError("makes masks of its own")
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

    On a CPU a product of few float32 rows with a transposed matrix takes up to half as long again as one with a matrix
    that lies the right way round. Weights that an embedding shares stay as they are.
    """
    embedded = {module.weight.data_ptr() for module in model.modules() if isinstance(module, nn.Embedding)}
    for module in model.modules():
        if type(module) is not nn.Linear or module.weight.data_ptr() in embedded:
            continue
        weight = module.weight.data
        if weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.is_contiguous():
            module.weight.data = weight.t().contiguous().t()
