"""The plain runner: an unmodified transformers model, called eagerly, its cache compacted after each verdict.

Rows keep different numbers of tokens, yet a transformers cache is one rectangle. So every row's surviving slots lie at
the right end of it, with left padding before them, and a 2-D mask and explicit positions to match. Keeping the same
count in all rows is a crop; keeping different ones is a gather of whole slots. The cache is a `DynamicCache()` made
without the model's configuration, so that no layer drops slots behind a sliding window: a rollback must find them
again, and the windowed mask is exact on right-aligned rows.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from harness.decoding.transfer import to_device


class RollbackError(RuntimeError):
    """The model keeps state outside the KV cache, so that what it has seen cannot be taken back."""


class EagerRunner:
    """A `Runner` over any decoder-only transformers model whose only state is its KV cache.

    Args:
        model: in evaluation mode, with its weights on their devices.
        vocabulary_size: logits are cut to this width; embeddings are often padded differently in target and draft.
        device: where tokens go in and logits come out; the model's own by default.
    """

    def __init__(
        self, model: PreTrainedModel, *, vocabulary_size: int | None = None, device: torch.device | None = None
    ) -> None:
        self._model = model
        self._vocabulary_size = vocabulary_size
        self._device = device or model.device
        parameters = inspect.signature(model.forward).parameters
        self._takes_positions = "position_ids" in parameters
        self._takes_logits_to_keep = "logits_to_keep" in parameters
        self._cache = DynamicCache()
        self._lengths: list[int] = []  # kept tokens of each row
        self._num_extended = 0  # since the last keep

    @torch.inference_mode()
    def start(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """See `Runner.start`. Raises RollbackError if the model leaves no trace in the cache."""
        if not prompts or not all(prompts):
            raise ValueError("every prompt needs at least one token")
        self._cache = DynamicCache()
        self._num_extended = 0
        width = max(map(len, prompts))
        # Many samples of one prompt: it is read once.
        read = prompts[:1] if all(prompt == prompts[0] for prompt in prompts) else prompts
        tokens = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in read], device=self._device)
        self._lengths = [len(prompt) - width for prompt in read]  # so that positions end at the prompt's own length
        logits = self._forward(tokens, only_last=True)
        if len(read) < len(prompts):
            self._cache.batch_repeat_interleave(len(prompts))
            logits = logits.expand(len(prompts), -1, -1)
        self._lengths = [len(prompt) for prompt in prompts]
        layers = self._cache.layers
        if not layers or not all(type(layer) is DynamicLayer and layer.get_seq_length() == width for layer in layers):
            raise RollbackError(f"{type(self._model).__name__} does not keep its state in a KV cache")
        return logits[:, -1]

    @torch.inference_mode()
    def extend(self, tokens: Tensor) -> Tensor:
        """See `Runner.extend`."""
        logits = self._forward(tokens, only_last=False)
        self._num_extended += tokens.shape[1]
        return logits

    def keep(self, counts: Sequence[int]) -> None:
        """See `Runner.keep`."""
        if not all(0 <= count <= self._num_extended for count in counts):
            raise ValueError(f"cannot keep {list(counts)} of {self._num_extended} tokens")
        num_slots = self._width - self._num_extended
        self._lengths = [length + count for length, count in zip(self._lengths, counts, strict=True)]
        self._num_extended = 0
        if min(counts) < max(counts):
            self._gather_right([num_slots + count for count in counts])
        elif self._width > num_slots + counts[0]:
            for layer in self._layers():
                layer.keys = layer.keys.narrow(-2, 0, num_slots + counts[0])
                layer.values = layer.values.narrow(-2, 0, num_slots + counts[0])

    def select(self, rows: Sequence[int]) -> None:
        """See `Runner.select`."""
        if self._num_extended:
            raise ValueError("keep what was extended before selecting rows")
        self._cache.batch_select_indices(to_device(rows, self._device))
        self._lengths = [self._lengths[row] for row in rows]
        if max(self._lengths) < self._width:
            self._gather_right([self._width] * len(rows))

    @property
    def _width(self) -> int:
        return self._cache.get_seq_length()

    def _forward(self, tokens: Tensor, *, only_last: bool) -> Tensor:
        """Run the model over tokens [B, n] behind the cache -> logits [B, n, V], or [B, 1, V] with `only_last`."""
        arguments: dict[str, object] = {}
        num_slots, num_new = self._width, tokens.shape[1]
        starts = [length + self._num_extended for length in self._lengths]
        if any(start != num_slots for start in starts):
            # Slots before a row's first token are padding; in a prompt that comes to negative positions.
            first_slots = to_device([num_slots - start for start in starts], self._device).unsqueeze(1)
            slots = torch.arange(num_slots + num_new, device=self._device)
            arguments["attention_mask"] = (slots >= first_slots).long()
            if self._takes_positions:
                arguments["position_ids"] = (slots[num_slots:] - first_slots).clamp(min=0)
        if only_last and self._takes_logits_to_keep:
            arguments["logits_to_keep"] = 1
        logits = self._model(input_ids=tokens, past_key_values=self._cache, use_cache=True, **arguments).logits
        return logits[..., : self._vocabulary_size]

    def _gather_right(self, ends: Sequence[int]) -> None:
        """Move each row's slots so that slot ends[b] - 1 becomes the last, in the width of the longest row."""
        width = max(self._lengths)
        sources = to_device(ends, self._device).unsqueeze(1) - width + torch.arange(width, device=self._device)
        sources.clamp_(min=0)  # padding; any slot will do
        for layer in self._layers():
            layer.keys = _take_slots(layer.keys, sources)
            layer.values = _take_slots(layer.values, sources)

    def _layers(self) -> list[Any]:
        """Layers with `keys` and `values` [B, heads, slots, D]; `start` has made sure that they are nothing else."""
        return self._cache.layers


def _take_slots(states: Tensor, sources: Tensor) -> Tensor:
    """states [B, heads, slots, D] and sources [B, width] -> [B, heads, width, D]."""
    # Whole slots of D numbers are copied: several times faster than gathering numbers one by one.
    num_rows, num_heads, num_slots, dimension = states.shape
    sources = sources.to(states.device)
    heads = torch.arange(num_rows * num_heads, device=states.device).view(num_rows, num_heads, 1)
    flat = (heads * num_slots + sources.unsqueeze(1)).flatten()
    return states.reshape(-1, dimension).index_select(0, flat).view(num_rows, num_heads, -1, dimension)
