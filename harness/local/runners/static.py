"""A runner whose KV cache has a fixed size: every row keeps its own slots, and a roll-back only
changes lengths.

Nothing is moved or copied as a text grows, and attention reads no more slots than the longest row
has. This runner runs the model eagerly, on any shape; `runners.compiled` compiles some of its passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from harness.config.amounts import round_up
from harness.local.decoding.protocols import Runner, Step
from harness.local.decoding.randomness import draw
from harness.local.decoding.transfer import padded, to_device
from harness.local.decoding.warp import AnyWarp
from harness.local.runners.attention import without_cudnn
from harness.local.runners.base import (
    Options,
    logits_to_keep,
    require_tokens,
    right_aligned,
    run_model,
)
from harness.local.runners.checks import compare_with_plain, longest_span
from harness.local.runners.slots import SlotForward, Slots, UnsupportedModelError

# The width of a mask is a multiple of this number: 16 bytes in half precision.
_MASK_ALIGNMENT = 8

# The slots before the first batch, and while there is none.
_NONE = Slots([])


class StaticRunner(Runner):
    """A `Runner` over any transformers model, in evaluation mode, that takes explicit positions and
    masks and has no state but its KV cache, wholly on a CPU or on GPUs.

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
        device_map = getattr(model, "hf_device_map", {})
        places = {str(place) for place in device_map.values()}
        is_offloaded = not places.isdisjoint({"cpu", "disk"})
        if is_offloaded and places != {"cpu"}:
            raise UnsupportedModelError(f"is on {', '.join(sorted(places))}")
        self._model = model
        self._options = options
        self._device = options.get("device") or model.device
        self._forward = SlotForward(model, options)
        self._reserved = num_slots
        self._slots = _NONE
        self._lengths: Sequence[int] = []  # kept tokens of each row
        self._num_extended = 0  # since the last keep

    @torch.inference_mode()
    def start(self, prompts: Sequence[Sequence[int]]) -> Step:
        """Begin a new batch. Raises UnsupportedModelError for a model that fills no KV cache."""
        require_tokens(prompts)
        longest = max(map(len, prompts))
        if len(prompts) > self._slots.num_rows or longest >= self._slots.num_slots:
            self._slots = _NONE  # before the prompts take memory
        self._lengths = list(map(len, prompts))
        self._num_extended = 0
        # Many samples of one prompt: it is read once.
        are_equal = all(prompt == prompts[0] for prompt in prompts)
        states, outputs = self._read_prompts(prompts[:1] if are_equal else prompts)
        num_rows = len(prompts)
        if self._slots is _NONE:
            num_slots = round_up(max(longest, self._reserved - 1) + 1)
            self._slots = Slots.like(states, num_rows, num_slots)
        self._slots.first_rows(num_rows).write(states)
        return Step(*(output.expand(num_rows, *output.shape[1:]) for output in outputs))

    @torch.inference_mode()
    def add(self, prompts: Sequence[Sequence[int]]) -> Step:
        self._require_kept()
        require_tokens(prompts)
        # As in `start`: a prompt that several rows begin with at once is read once.
        distinct = list(dict.fromkeys(map(tuple, prompts)))
        states, outputs = self._read_prompts(distinct)
        rows = [distinct.index(tuple(prompt)) for prompt in prompts]
        num_before = len(self._lengths)
        self._lengths = [*self._lengths, *map(len, prompts)]
        num_rows = len(self._lengths)
        longest = max(self._lengths)
        old = self._slots
        if num_rows > old.num_rows or longest >= old.num_slots:
            num_slots = max(old.num_slots, round_up(longest + 1))
            self._slots = Slots.like(states, num_rows, num_slots)
            self._slots.first_rows(num_before).write(old.first_rows(num_before).buffers)
        index = to_device(rows, self._device)
        states = [state[index.to(state.device)] for state in states]
        self._slots.first_rows(num_rows).write(states, num_before)
        return Step(*(output[index] for output in outputs))

    @torch.inference_mode()
    def extend(self, tokens: Tensor) -> Step:
        return Step(*self._extend(tokens))

    @torch.inference_mode()
    def read(self, tokens: Tensor, lengths: Sequence[int]) -> Step:
        last_places = to_device(lengths, self._device) - 1
        step = Step(*self._extend(tokens, last_places=last_places))
        self.keep(lengths)
        return step

    @torch.inference_mode()
    def draw(self, tokens: Tensor, uniforms: Tensor, warp: AnyWarp) -> tuple[Tensor, Tensor]:
        # Each token is drawn after the last one: logits after the others are not needed.
        only_last = logits_to_keep(self._model)

        def extend(new_tokens: Tensor) -> Tensor:
            outputs = self._extend(new_tokens, **only_last)
            return outputs[0]

        return draw(extend, tokens, uniforms, warp)

    def keep(self, counts: Sequence[int]) -> None:
        if not all(0 <= count <= self._num_extended for count in counts):
            raise ValueError(f"cannot keep {list(counts)} of {self._num_extended} tokens")
        # Lengths say which slots count: nothing else is to be done.
        lengths = zip(self._lengths, counts, strict=True)
        self._lengths = [length + count for length, count in lengths]
        self._num_extended = 0

    @torch.inference_mode()
    def select(self, rows: Sequence[int]) -> None:
        self._require_kept()
        self._lengths = [self._lengths[row] for row in rows]
        if len(rows) > self._slots.num_rows:
            old = self._slots
            self._slots = Slots.like(old.buffers, len(rows), old.num_slots)
            self._slots.first_rows(old.num_rows).write(old.buffers)
        moved = [place for place, row in enumerate(rows) if place != row]
        if moved:
            first = moved[0]
            index = to_device(rows[first:], self._device)
            self._slots.select(index, max(self._lengths), first)

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

    @torch.inference_mode()
    def clear(self) -> None:
        self._lengths = []
        self._num_extended = 0
        self._slots.clear()

    def close(self) -> None:
        self.clear()
        self._slots = _NONE
        self._forward.close()

    def _require_kept(self) -> None:
        if self._num_extended:
            raise ValueError("keep what was extended before rows join or leave")

    def _read_prompts(
        self, prompts: Sequence[Sequence[int]]
    ) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        """Run the model over prompts -> in turn the keys and the values of each layer, [B, heads,
        n, D] each, and the tensors of a Step.
        """
        lengths = list(map(len, prompts))
        # Padding follows a prompt, which therefore never sees it: positions and masks are the
        # model's own.
        tokens = to_device(padded(prompts, max(lengths)), self._device)
        last_places = to_device(lengths, self._device) - 1
        # Without the model's configuration no layer drops slots behind a sliding window: a
        # roll-back may need them.
        cache: Any = DynamicCache()
        with without_cudnn():
            logits, *hidden = run_model(self._model, self._options, tokens, cache, last_places)
        states: list[Tensor] = []
        for layer in cache.layers:
            if type(layer) is not DynamicLayer or layer.get_seq_length() != max(lengths):
                states = []
                break
            assert layer.keys is not None
            assert layer.values is not None
            states += [layer.keys, layer.values]
        if not states:
            raise UnsupportedModelError("does not keep its state in a KV cache")
        return states, (logits, *(right_aligned(output, lengths) for output in hidden))

    def _extend(self, tokens: Tensor, **arguments: Any) -> tuple[Tensor, ...]:
        """Append tokens [B, n] of texts -> what `run_model` returns with these arguments."""
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
        has_mask = num_tokens > 1 or not are_equal
        if has_mask:
            # A GPU's kernel copies a mask of any other width, in every layer. The mask hides the
            # slots that this adds.
            num_seen = round_up(num_seen, _MASK_ALIGNMENT)
        slots = replace(self._slots.first_rows(num_rows), num_seen=num_seen)
        with without_cudnn():
            outputs = self._forward(slots, tokens, starts, **arguments)
        self._num_extended += num_tokens
        return outputs

    def _fits(self, num_tokens: int) -> bool:
        return max(self._lengths) + self._num_extended + num_tokens <= self._slots.num_slots

    def _starts(self, num_rows: int) -> Tensor:
        """Return the next slot of each row [B], on the device; rows that have ended write from slot
        0, unread.
        """
        starts = to_device([length + self._num_extended for length in self._lengths], self._device)
        num_ended = num_rows - len(starts)
        return nn.functional.pad(starts, (0, num_ended)) if num_ended else starts
