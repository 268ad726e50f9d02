"""The runner over a KV cache of fixed size: every row keeps its own slots, and a roll-back only
changes lengths.

Nothing is moved or copied as a text grows, and attention reads no more slots than the longest row
has. Over fixed slots (`fix`) a pass is a function of tensors, which can be compiled and captured.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, PreTrainedModel

from harness.config.amounts import BUCKET, round_up
from harness.config.run import RunnerName
from harness.local.decoding.iteration import filled_up
from harness.local.decoding.protocols import Runner, Step, TokenRows
from harness.local.decoding.transfer import padded, to_device
from harness.local.runners.base import (
    Options,
    UnsupportedModelError,
    WithoutCudnn,
    joined,
    run_model,
)
from harness.local.runners.checks import ANY_LENGTH, check_runner
from harness.local.runners.compiled import Part, compiling, end_part
from harness.local.runners.forward import SlotForward
from harness.local.runners.slots import KeysAndValues, SlotCache

# The width of a mask is a multiple of this number: 16 bytes in half precision.
_MASK_ALIGNMENT = 8


class StaticRunner(Runner):
    """A `Runner` over any transformers model, in evaluation mode, that takes explicit positions and
    masks and has no state but its KV cache, wholly on a CPU or on GPUs.

    Raises UnsupportedModelError if the model needs the snapshot runner.
    """

    def __init__(self, model: PreTrainedModel, **options: Unpack[Options]) -> None:
        self._model = model
        self._options = options
        self._device = model.device
        self._forward = SlotForward(model, options)
        self._cache = SlotCache()
        self._lengths: Sequence[int] = []  # kept tokens of each row
        self._num_extended = 0  # since the last keep
        # Those of fixed rows, a pass over them, and its widths, ascending.
        self._fixed_cache = SlotCache()
        self._pass = Part(self._forward, [self._model])
        self._widths: Sequence[int] = ()
        self.name: RunnerName = "static"

    def start(self, prompts: TokenRows, num_slots: int = 0, *, alone: bool = False) -> Step:
        """Begin a new batch. Raises UnsupportedModelError for a model that fills no KV cache."""
        num_slots = num_slots or max(map(len, prompts)) + BUCKET
        if self._fixed_cache.has_room(len(prompts), num_slots):
            self._cache = self._fixed_cache
        elif not self._cache.has_room(len(prompts), num_slots):
            self._cache = SlotCache(len(prompts), round_up(num_slots))
        self._lengths = list(map(len, prompts))
        self._num_extended = 0
        # Many samples of one prompt: it is read once.
        distinct = list(dict.fromkeys(map(tuple, prompts)))
        places = [distinct.index(tuple(prompt)) for prompt in prompts]
        steps = []
        for group in [[prompt] for prompt in distinct] if alone else [distinct]:
            states, step = self._read_prompts(group)
            first = distinct.index(group[0])
            rows = [row for row, place in enumerate(places) if distinct[place] in group]
            self._cache.write(states, rows, [places[row] - first for row in rows])
            steps.append(step)
        return joined(steps, places)

    def extend(self, tokens: Tensor) -> Step:
        num_rows, num_tokens = tokens.shape
        longest = max(self._lengths) + self._num_extended
        assert self._cache.has_room(num_rows, longest + num_tokens), "more tokens than were said"
        outputs: Sequence[Tensor] | None = None
        with self._forward.packing:
            if self._cache is self._fixed_cache:
                outputs = self._extend_fixed(tokens, longest)
            if outputs is None:
                outputs = self._extend_eagerly(tokens)
        self._num_extended += num_tokens
        return Step(*outputs)

    def extend_at(self, tokens: Tensor, starts: Tensor) -> Step:
        """Extend fixed rows by tokens [B, n] from the slots `starts` [B] on: a function of tensors alone. `keep`
        follows on the host.
        """
        assert self._cache is self._fixed_cache, "the batch has other slots than were prepared"
        # So that it has the same code, and numbers, as a pass by itself.
        end_part()
        with self._forward.packing:
            outputs = self._pass(tokens, starts)
        end_part()
        return Step(*outputs)

    def _extend_fixed(self, tokens: Tensor, longest: int) -> Sequence[Tensor] | None:
        """Extend by a pass of fixed rows, of more rows and tokens where there is none of these; None where there is no
        room for it.
        """
        num_rows, num_tokens = tokens.shape
        cache = self._fixed_cache
        width = next((width for width in self._widths if width >= num_tokens), None)
        if width is None or not cache.has_room(num_rows, longest + width):
            return None
        # Rows that only fill up the batch write from slot 0, unread.
        starts = filled_up(self._starts(), cache.num_rows)
        outputs = self._pass(filled_up(tokens, cache.num_rows, width), starts)
        return [output[:num_rows, :num_tokens] for output in outputs]

    def keep(self, counts: Sequence[int]) -> None:
        # Lengths say which slots count: nothing else is to be done. What `extend_at` has read is not counted here.
        lengths = zip(self._lengths, counts, strict=True)
        self._lengths = [length + count for length, count in lengths]
        self._num_extended = 0

    def select(self, rows: Sequence[int]) -> None:
        self._lengths = [self._lengths[row] for row in rows]
        if list(rows) != list(range(len(rows))):
            self._cache.select(to_device(rows, self._device), max(self._lengths))

    def check(self, num_slots: int = ANY_LENGTH) -> None:
        """Compare the outputs with the model's own (`check_runner`). Starts a new batch.

        Raises UnsupportedModelError if they differ by more than rounding, or if the model refuses
        its masks.
        """
        # Masks are rounded up, so that windows a little longer than a row are tested, too.
        check_runner(self, self._model, self._options, num_slots=num_slots + _MASK_ALIGNMENT)
        self._cache = SlotCache()  # those of the check may have more rows than the batch

    def fix(self, batch_size: int, num_slots: int, widths: Sequence[int]) -> None:
        """Make room for fixed rows: `extend_at` reads and writes these slots.

        `extend` goes by the same passes then, so that what reads a text gets the numbers of those that decoded it.

        Args:
            batch_size: the most rows of a batch.
            num_slots: of a row.
            widths: of the passes, in tokens.

        Raises UnsupportedModelError for a model whose passes read values on the host.
        """
        if getattr(self._model, "is_loaded_in_8bit", False):
            raise UnsupportedModelError(
                "is held in 8 bit: which of its columns are outliers is decided on the host"
            )
        if len(set(getattr(self._model, "hf_device_map", {}).values())) > 1:
            raise UnsupportedModelError("is on several devices")
        states, _ = self._read_prompts([[0]])
        cache = SlotCache(batch_size, round_up(num_slots))
        cache.write(states, [0], [0])  # which makes its buffers, where they stay
        self._fixed_cache = self._cache = cache
        self._pass = Part(functools.partial(self._forward, cache, cache.num_slots), [self._model])
        self._widths = sorted(set(widths))

    def compile(self) -> None:
        """Compile the passes of fixed rows, and compare their outputs with the model's own.

        Raises UnsupportedModelError if the model cannot be compiled, or then gives other outputs.
        The runner then has no fixed rows.
        """
        starts = torch.zeros(self._fixed_cache.num_rows, dtype=torch.long, device=self._device)
        try:
            with compiling(self._device):
                for width in self._widths:
                    self.extend_at(starts.unsqueeze(1).repeat(1, width), starts)
            self.name = "compiled"
            # Short rows are enough: compiled passes see all slots, so that a model that counts from
            # their end differs at any length.
            num_rows = min(2, self._fixed_cache.num_rows)
            check_runner(self, self._model, self._options, num_rows, num_slots=0)
        except UnsupportedModelError:
            self.close()
            raise

    def close(self) -> None:
        self._pass = Part(self._forward, [self._model])
        self._widths = ()
        self.name = "static"
        self._fixed_cache = SlotCache()
        self._cache = SlotCache()

    def _extend_eagerly(self, tokens: Tensor) -> Sequence[Tensor]:
        num_tokens = tokens.shape[1]
        longest = max(self._lengths) + self._num_extended
        are_equal = min(self._lengths) == max(self._lengths)
        num_seen = longest + num_tokens
        if num_tokens > 1 or not are_equal:
            # A GPU's kernel copies a mask of any other width, in every layer. The mask hides the
            # slots that this adds.
            num_seen = round_up(num_seen, _MASK_ALIGNMENT)
        starts = longest if are_equal else self._starts()
        with WithoutCudnn():
            return self._forward(self._cache, num_seen, tokens, starts)

    def _starts(self) -> Tensor:
        """Return the next slot of each row [B], on the device."""
        return to_device([length + self._num_extended for length in self._lengths], self._device)

    def _read_prompts(self, prompts: TokenRows) -> tuple[KeysAndValues, Step]:
        """Run the model over prompts -> the keys and values of each layer, and the step."""
        # Without the model's configuration no layer drops slots behind a sliding window: a
        # roll-back may need them.
        cache: Any = DynamicCache()
        lengths = list(map(len, prompts))
        # Padding follows a prompt, which therefore never sees it: positions and masks are the
        # model's own.
        tokens = to_device(padded(prompts, least=1), self._device)
        last_tokens = to_device(lengths, self._device) - 1
        with WithoutCudnn():
            logits, *hidden = run_model(self._model, self._options, tokens, cache, last_tokens)
        outputs = [logits]
        for of_rows in hidden:
            rows = [row[:length] for row, length in zip(of_rows, lengths, strict=True)]
            outputs.append(pad_sequence(rows, batch_first=True, padding_side="left"))
        lengths_read = {layer.get_seq_length() for layer in cache.layers}
        if lengths_read != {max(1, *lengths)}:
            raise UnsupportedModelError("does not keep its state in a KV cache")
        states = {index: (layer.keys, layer.values) for index, layer in enumerate(cache.layers)}
        return states, Step(*outputs)
