"""A runner whose KV cache has a fixed size: every row keeps its own slots, and a roll-back only
changes lengths.

Nothing is moved or copied as a text grows, and attention reads no more slots than the longest row
has. This runner runs the model eagerly, on any shape; `runners.compiled` compiles and captures the
same passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from harness.config.amounts import round_up
from harness.local.decoding.protocols import Cached, Step
from harness.local.decoding.randomness import draw
from harness.local.decoding.transfer import added, most, padded, to_device
from harness.local.decoding.trees import TreeShape
from harness.local.decoding.warp import AnyWarp
from harness.local.runners.attention import without_cudnn
from harness.local.runners.base import CacheRunner, Options, right_aligned, run_model
from harness.local.runners.checks import compare_with_plain, longest_span
from harness.local.runners.slots import SlotForward, Slots, TreePart, UnsupportedModelError

# The width of a mask is a multiple of this number: 16 bytes in half precision.
_MASK_ALIGNMENT = 8

# The slots before the first batch, and while there is none.
_NONE = Slots([])


class StaticRunner(CacheRunner):
    """A `Runner` over any transformers model that takes explicit positions and masks, wholly on a
    CPU or on GPUs.

    Raises UnsupportedModelError if the model needs the eager runner.
    """

    def __init__(
        self, model: PreTrainedModel, num_slots: int = 0, **options: Unpack[Options]
    ) -> None:
        """Wrap a model.

        Args:
            num_slots: the tokens for which each row gets slots at once, prompt included. A longer
                row gets more when it needs them.
        """
        super().__init__(model, **options)
        device_map = getattr(model, "hf_device_map", {})
        places = {str(place) for place in device_map.values()}
        is_offloaded = not places.isdisjoint({"cpu", "disk"})
        if is_offloaded and places != {"cpu"}:
            raise UnsupportedModelError(f"is on {', '.join(sorted(places))}")
        self._forward = SlotForward(model, options)
        self._reserved = num_slots
        self._slots = _NONE

    def start(self, prompts: Sequence[Sequence[int]]) -> Step:
        if not self._has_room(self._slots, prompts):
            self._slots = _NONE  # before the prompts take memory
        return super().start(prompts)

    @torch.inference_mode()
    def clear(self) -> None:
        super().clear()
        self._slots.clear()

    def close(self) -> None:
        self._slots = _NONE
        super().close()
        self._forward.close()

    def cached(self, layers: Sequence[int]) -> Cached:
        slots = self._slots.first_rows(len(self._lengths))
        width = most(self._lengths)
        states = [buffer[:, :, :width] for buffer in slots.buffers]
        return Cached([(states[2 * layer], states[2 * layer + 1]) for layer in layers])

    @torch.inference_mode()
    def extend(self, tokens: Tensor, tree: TreeShape | None = None) -> Step:
        if tree is None:
            return Step(*self._extend(tokens))
        self._require_whole_trees(tokens, tree)
        part = TreePart.of(tree, tokens.shape[1], self._device)
        return Step(*self._extend(tokens, tree=part))

    @torch.inference_mode()
    def draw(self, tokens: Tensor, uniforms: Tensor, warp: AnyWarp) -> tuple[Tensor, Tensor]:
        def extend(new_tokens: Tensor) -> Tensor:
            # Each token is drawn after the last one: logits after the others are not needed.
            outputs = self._extend(new_tokens, **self._only_last)
            return outputs[0]

        return draw(extend, tokens, uniforms, warp)

    def _extend(self, tokens: Tensor, **arguments: Any) -> tuple[Tensor, ...]:
        num_rows, num_tokens = tokens.shape
        if not self._fits(num_tokens):
            old = self._slots.first_rows(len(self._lengths))
            num_needed = max(self._lengths) + self._num_extended + num_tokens
            self._slots = Slots.like(old.buffers, old.num_rows, round_up(2 * num_needed))
            self._slots.write(old.buffers)
        longest = max(self._lengths) + self._num_extended
        are_equal = min(self._lengths) == max(self._lengths)
        starts = longest if are_equal else self._starts(num_rows)
        num_seen = longest + num_tokens
        has_mask = num_tokens > 1 or not are_equal or "tree" in arguments
        if has_mask:
            # A GPU's kernel copies a mask of any other width, in every layer. The mask hides the
            # slots that this adds.
            num_seen = round_up(num_seen, _MASK_ALIGNMENT)
        slots = replace(self._slots.first_rows(num_rows), num_seen=num_seen)
        with without_cudnn():
            outputs = self._forward(slots, tokens, starts, **arguments)
        self._num_extended += num_tokens
        return outputs

    @torch.inference_mode()
    def check(self, num_slots: int | None = None) -> None:
        """Compare the outputs with the model's own, also behind its longest window, chunk or block
        of attention. Starts a new batch.

        Args:
            num_slots: the most tokens of a row; windows that no row exceeds are not tested. None:
                rows of any length.

        Raises UnsupportedModelError if they differ by more than rounding, or if the model refuses
        its masks.
        """
        # A mask may end some slots behind the longest row.
        num_seen = None if num_slots is None else num_slots + _MASK_ALIGNMENT
        span = longest_span(self._model.config, num_seen)
        reserved = self._reserved
        self._reserved = 0
        for num_before in sorted({0, span}):
            compare_with_plain(self, self._model, self._options, num_before=num_before)
        self._reserved = reserved
        self._slots = Slots.like(self._slots.buffers, 0, 0)

    def _read(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, ...]:
        lengths = list(map(len, prompts))
        # Padding follows a prompt, which therefore never sees it: positions and masks are the
        # model's own.
        tokens = to_device(padded(prompts, max(lengths)), self._device)

        last_places = to_device(lengths, self._device) - 1
        with without_cudnn():
            logits, *hidden = run_model(
                self._model, self._options, tokens, self._cache, last_places
            )
        return logits, *(right_aligned(states, lengths) for states in hidden)

    def _begin(self) -> None:
        states = self._take_read()
        num_rows = len(self._lengths)
        if self._slots is _NONE:
            num_slots = round_up(max(*self._lengths, self._reserved - 1) + 1)
            self._slots = Slots.like(states, num_rows, num_slots)
        self._slots.first_rows(num_rows).write(states)

    def _append(self, before: Any, num_before: int) -> None:
        states = self._take_read()
        old = self._slots
        num_rows = len(self._lengths)
        longest = max(self._lengths)
        if num_rows > old.num_rows or longest >= old.num_slots:
            num_slots = max(old.num_slots, round_up(longest + 1))
            self._slots = Slots.like(states, num_rows, num_slots)
            rows_before = old.first_rows(num_before)
            self._slots.first_rows(num_before).write(rows_before.buffers)
        self._slots.first_rows(num_rows).write(states, num_before)

    def _take_read(self) -> list[Tensor]:
        """Take out of the cache, in turn, the keys and the values of each layer, [B, heads, n, D]
        each.
        """
        states: list[Tensor] = []
        for layer in self._cache.layers:
            states += [layer.keys, layer.values]
        self._cache = DynamicCache()
        return states

    def _roll_back(self, dropped: Sequence[int]) -> None:
        """Nothing to do: lengths say which slots count."""

    def _reorder(self, kept: Tensor) -> None:
        starts = to_device(self._lengths, kept.device).unsqueeze(1)
        places = torch.arange(kept.shape[1], device=kept.device)
        self._slots.move(starts + kept, starts + places)

    def _select(self, rows: Sequence[int]) -> None:
        if len(rows) > self._slots.num_rows:
            old = self._slots
            self._slots = Slots.like(old.buffers, len(rows), old.num_slots)
            self._slots.first_rows(old.num_rows).write(old.buffers)
        moved = [place for place, row in enumerate(rows) if place != row]
        if moved:
            first = moved[0]
            index = to_device(rows[first:], self._device)
            self._slots.select(index, max(self._lengths), first)

    def _has_room(self, slots: Slots, prompts: Sequence[Sequence[int]]) -> bool:
        return len(prompts) <= slots.num_rows and max(map(len, prompts)) < slots.num_slots

    def _fits(self, num_tokens: int) -> bool:
        return most(self._lengths) + self._num_extended + num_tokens <= self._slots.num_slots

    def _starts(self, num_rows: int) -> Tensor:
        """Return the next slot of each row [B], on the device; rows that have ended write from slot
        0, unread.
        """
        starts = to_device(added(self._lengths, self._num_extended), self._device)
        num_ended = num_rows - len(starts)
        return nn.functional.pad(starts, (0, num_ended)) if num_ended else starts
