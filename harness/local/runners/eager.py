"""The plain runner: an unmodified transformers model, called eagerly, its cache compacted after
each verdict.

Rows keep different numbers of tokens, yet a transformers cache is one rectangle. So every row's
slots are at its right end, with left padding before them, and a 2-D mask and explicit positions to
match. Keeping the same count in all rows is a crop; keeping different ones is a gather of whole
slots. Sliding windows are exact on right-aligned rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from harness.local.decoding.protocols import Cached, Step
from harness.local.decoding.transfer import to_device
from harness.local.decoding.trees import TreeShape
from harness.local.runners.attention import without_cudnn
from harness.local.runners.base import (
    CacheRunner,
    context_of,
    left_padded,
    run_model,
    stacked,
    within,
)
from harness.local.runners.checks import compare_with_plain, longest_span
from harness.local.runners.slots import TreePart, attention_windows, tree_masks


class EagerRunner(CacheRunner):
    """A `Runner` over any decoder-only transformers model whose only state is its KV cache; see
    `CacheRunner`.
    """

    def check(self, num_rows: int, num_slots: int | None = None) -> None:
        """Compare the outputs over a window, chunk or block of attention with the model's own.
        Starts a new batch.

        `num_slots` are the most tokens of a row; None: any number. A model without windows is taken
        as it is.

        Raises UnsupportedModelError if they differ by more than rounding.
        """
        span = longest_span(self._model.config, num_slots)
        if span == 0:
            return
        rows = min(2, num_rows)
        compare_with_plain(self, self._model, self._options, num_rows=rows, num_before=span)

    def cached(self, layers: Sequence[int]) -> Cached:
        states = [self._cache.layers[layer] for layer in layers]
        end = self._cache.get_seq_length() - self._num_extended
        first_slots = to_device([end - length for length in self._lengths], self._device)
        return Cached([(one.keys, one.values) for one in states], first_slots.unsqueeze(1))

    @torch.inference_mode()
    def extend(self, tokens: Tensor, tree: TreeShape | None = None) -> Step:
        if tree is None:
            return Step(*self._extend(tokens))
        self._require_whole_trees(tokens, tree)
        outputs = self._read_trees(tokens, tree)
        self._num_extended += tokens.shape[1]
        return Step(*outputs)

    def _extend(self, tokens: Tensor, **arguments: Any) -> tuple[Tensor, ...]:
        starts = [length + self._num_extended for length in self._lengths]
        outputs = self._forward(tokens, starts, **arguments)
        self._num_extended += tokens.shape[1]
        return outputs

    def _read_trees(self, tokens: Tensor, shape: TreeShape) -> tuple[Tensor, ...]:
        """Read the last tokens [B, n] of trees after the cache.

        Raises UnsupportedModelError for a model that makes its own masks or positions.
        """
        num_tokens = tokens.shape[1]
        num_before = self._cache.get_seq_length()
        num_slots = num_before + num_tokens
        lengths = to_device(self._lengths, self._device).unsqueeze(1)
        num_padding = num_before - self._num_extended - lengths
        written = torch.arange(num_before, num_slots, device=self._device).unsqueeze(0)
        part = TreePart.of(shape, num_tokens, self._device)
        masks = tree_masks(
            tree=part,
            written=written,
            width=num_slots,
            windows=attention_windows(self._model),
            dtype=self._cache.layers[0].keys.dtype,
            first_slots=num_padding,
        )
        positions = within(lengths + part.own_depths, context_of(self._model))
        with without_cudnn():
            return run_model(
                self._model,
                self._options,
                tokens,
                self._cache,
                attention_mask=masks,
                position_ids=positions,
            )

    def _read(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, ...]:
        num_padding, tokens = left_padded(prompts, self._device)
        # Positions end at the prompt's own length.
        starts = [-count for count in num_padding]
        logits, *hidden = self._forward(tokens, starts, **self._only_last)
        return logits[:, -1], *hidden

    def _begin(self) -> None:
        if self._cache.layers[0].keys.shape[0] < len(self._lengths):
            self._cache.batch_repeat_interleave(len(self._lengths))

    def _append(self, before: Any, num_before: int) -> None:
        for new, old in zip(self._cache.layers, before.layers, strict=True):
            new.keys = stacked(old.keys, new.keys)
            new.values = stacked(old.values, new.values)

    @torch.inference_mode()
    def _roll_back(self, dropped: Sequence[int]) -> None:
        num_slots = self._cache.get_seq_length()
        if min(dropped) < max(dropped):
            self._gather_right([num_slots - count for count in dropped])
            return
        num_kept = num_slots - dropped[0]
        for layer in self._cache.layers:
            layer.keys = layer.keys.narrow(-2, 0, num_kept)
            layer.values = layer.values.narrow(-2, 0, num_kept)

    def _reorder(self, kept: Tensor) -> None:
        num_rows, num_kept = kept.shape
        first = self._cache.get_seq_length() - self._num_extended
        rows = torch.arange(num_rows, device=kept.device).unsqueeze(1)
        for layer in self._cache.layers:
            for states in (layer.keys, layer.values):
                device = states.device
                extended = states[:, :, first:].transpose(1, 2)
                taken = extended[rows.to(device), kept.to(device)]
                states[:, :, first : first + num_kept] = taken.transpose(1, 2)

    def _select(self, rows: Sequence[int]) -> None:
        kept = to_device(rows, self._device)
        for layer in self._cache.layers:
            layer.batch_select_indices(kept.to(layer.keys.device))
        num_slots = self._cache.get_seq_length()
        if max(self._lengths) < num_slots:
            self._gather_right([num_slots] * len(rows))

    def _forward(
        self, tokens: Tensor, starts: Sequence[int], **arguments: Any
    ) -> tuple[Tensor, ...]:
        """Read tokens [B, n] after the cache; row b has starts[b] tokens before them."""
        num_slots = self._cache.get_seq_length()
        num_new = tokens.shape[1]
        if any(start != num_slots for start in starts):
            # Slots before a row's first token are padding; in a prompt they have negative
            # positions.
            num_padding = [num_slots - start for start in starts]
            first_slots = to_device(num_padding, self._device).unsqueeze(1)
            slots = torch.arange(num_slots + num_new, device=self._device)
            arguments["attention_mask"] = (slots >= first_slots).long()
            if "position_ids" in self._parameters:
                positions = (slots[num_slots:] - first_slots).clamp(min=0)
                arguments["position_ids"] = within(positions, context_of(self._model))
        with without_cudnn():
            return run_model(self._model, self._options, tokens, self._cache, **arguments)

    def _gather_right(self, ends: Sequence[int]) -> None:
        """Move each row's slots so that slot ends[b] - 1 becomes the last, in the width of the
        longest row.
        """
        width = max(self._lengths)
        starts = to_device(ends, self._device).unsqueeze(1) - width
        sources = starts + torch.arange(width, device=self._device)
        # Padding has no source: any slot will do.
        sources.clamp_(min=0)
        for layer in self._cache.layers:
            layer.keys = _take_slots(layer.keys, sources)
            layer.values = _take_slots(layer.values, sources)


def _take_slots(states: Tensor, sources: Tensor) -> Tensor:
    """Take the slots sources [B, width] of states [B, heads, slots, D] -> [B, heads, width, D]."""
    # Whole slots of D numbers are copied: several times faster than gathering numbers one by one.
    num_rows, num_heads, num_slots, dimension = states.shape
    sources = sources.to(states.device)
    heads = torch.arange(num_rows * num_heads, device=states.device).view(num_rows, num_heads, 1)
    flat = (heads * num_slots + sources.unsqueeze(1)).flatten()
    taken = states.reshape(-1, dimension).index_select(0, flat)
    return taken.view(num_rows, num_heads, -1, dimension)
