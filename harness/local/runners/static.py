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

from harness.config.amounts import round_up
from harness.config.run import RunnerName
from harness.local.decoding.iteration import filled_up
from harness.local.decoding.protocols import Runner, Step, TokenRows
from harness.local.decoding.transfer import padded, to_device
from harness.local.runners.base import Options, UnsupportedModelError, WithoutCudnn, run_model
from harness.local.runners.checks import ANY_LENGTH, check_runner
from harness.local.runners.compiled import Part, compiling, end_part
from harness.local.runners.forward import SlotForward
from harness.local.runners.slots import Slots

# The width of a mask is a multiple of this number: 16 bytes in half precision.
_MASK_ALIGNMENT = 8

_NO_SLOTS = Slots([])


class StaticRunner(Runner):
    """A `Runner` over any transformers model, in evaluation mode, that takes explicit positions and
    masks and has no state but its KV cache, wholly on a CPU or on GPUs.

    Raises UnsupportedModelError if the model needs the snapshot runner.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        num_slots: int = 0,
        **options: Unpack[Options],
    ) -> None:
        """Wrap a model.

        Args:
            num_slots: the tokens for which each row gets slots at once, prompt included. A longer
                row gets more when it needs them.
        """
        self._model = model
        self._options = options
        self._device = model.device
        self._forward = SlotForward(model, options)
        self._reserved = num_slots
        self._slots = _NO_SLOTS
        self._lengths: Sequence[int] = []  # kept tokens of each row
        self._num_extended = 0  # since the last keep
        # Those of fixed rows, a pass over them, and its widths, ascending.
        self._fixed_slots = _NO_SLOTS
        self._pass = Part(self._forward, [self._model])
        self._widths: Sequence[int] = ()
        self.name: RunnerName = "static"

    def start(self, prompts: TokenRows) -> Step:
        """Begin a new batch. Raises UnsupportedModelError for a model that fills no KV cache."""
        num_needed = max(map(len, prompts)) + 1
        if self._fixed_slots.have_room(len(prompts), num_needed):
            self._slots = self._fixed_slots
        elif not self._slots.have_room(len(prompts), num_needed):
            self._slots = _NO_SLOTS  # before the prompts take memory
        self._lengths = []
        self._num_extended = 0
        return self.add(prompts)

    def add(self, prompts: TokenRows) -> Step:
        # Many samples of one prompt: it is read once.
        distinct = list(dict.fromkeys(map(tuple, prompts)))
        states, outputs = self._read_prompts(distinct)
        if len(distinct) < len(prompts):
            rows = to_device([distinct.index(tuple(prompt)) for prompt in prompts], self._device)
            states = [state[rows.to(state.device)] for state in states]
            outputs = [output[rows] for output in outputs]
        lengths = [*self._lengths, *map(len, prompts)]
        if not self._slots.buffers:
            self._slots = Slots.like(states, 0, 0)
        # Each row is extended by a token at least.
        self._make_room(len(lengths), max(self._reserved, max(lengths) + 1))
        self._slots.write(states, len(self._lengths))
        # Last: without memory for these rows the others go on.
        self._lengths = lengths
        return Step(*outputs)

    def extend(self, tokens: Tensor) -> Step:
        num_rows, num_tokens = tokens.shape
        longest = max(self._lengths) + self._num_extended
        if not self._slots.have_room(num_rows, longest + num_tokens):
            self._make_room(num_rows, 2 * (longest + num_tokens))
        slots = self._slots
        outputs: Sequence[Tensor] | None = None
        with self._forward.packing:
            if slots is self._fixed_slots:
                outputs = self._extend_fixed(tokens, longest)
            if outputs is None:
                outputs = self._extend_eagerly(tokens)
        self._num_extended += num_tokens
        return Step(*outputs)

    def extend_at(self, tokens: Tensor, starts: Tensor) -> Step:
        """Extend fixed rows by tokens [B, n] from the slots `starts` [B] on: a function of tensors alone. `keep`
        follows on the host.
        """
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
        slots = self._fixed_slots
        width = next((width for width in self._widths if width >= num_tokens), None)
        if width is None or not slots.have_room(num_rows, longest + width):
            return None
        # Rows that only fill up the batch write from slot 0, unread.
        starts = filled_up(self._starts(), slots.num_rows)
        outputs = self._pass(filled_up(tokens, slots.num_rows, width), starts)
        return [output[:num_rows, :num_tokens] for output in outputs]

    def keep(self, counts: Sequence[int]) -> None:
        # Lengths say which slots count: nothing else is to be done. What `extend_at` has read is not counted here.
        lengths = zip(self._lengths, counts, strict=True)
        self._lengths = [length + count for length, count in lengths]
        self._num_extended = 0

    def select(self, rows: Sequence[int]) -> None:
        self._lengths = [self._lengths[row] for row in rows]
        self._make_room(len(rows), 0)
        if list(rows) != list(range(len(rows))):
            self._slots.select(to_device(rows, self._device), max(self._lengths))

    def check(self, num_slots: int = ANY_LENGTH) -> None:
        """Compare the outputs with the model's own (`check_runner`). Starts a new batch.

        Raises UnsupportedModelError if they differ by more than rounding, or if the model refuses
        its masks.
        """
        reserved = self._reserved
        self._reserved = 0
        # Masks are rounded up, so that windows a little longer than a row are tested, too.
        check_runner(self, self._model, self._options, num_slots=num_slots + _MASK_ALIGNMENT)
        self._reserved = reserved
        self._slots = _NO_SLOTS  # those of the check may have more rows than the batch

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
        slots = Slots.like(states, batch_size, round_up(num_slots))
        self._fixed_slots = slots
        self._pass = Part(functools.partial(self._forward, slots, slots.num_slots), [self._model])
        self._widths = sorted(set(widths))

    def compile(self) -> None:
        """Compile the passes of fixed rows, and compare their outputs with the model's own.

        Raises UnsupportedModelError if the model cannot be compiled, or then gives other outputs.
        The runner then has no fixed rows.
        """
        starts = torch.zeros(self._fixed_slots.num_rows, dtype=torch.long, device=self._device)
        try:
            with compiling(self._device):
                for width in self._widths:
                    self.extend_at(starts.unsqueeze(1).repeat(1, width), starts)
            self.name = "compiled"
            # Short rows are enough: compiled passes see all slots, so that a model that counts from
            # their end differs at any length.
            num_rows = min(2, self._fixed_slots.num_rows)
            check_runner(self, self._model, self._options, num_rows, num_slots=0)
        except UnsupportedModelError:
            self.close()
            raise

    def close(self) -> None:
        self._pass = Part(self._forward, [self._model])
        self._widths = ()
        self.name = "static"
        self._fixed_slots = _NO_SLOTS
        self._slots = _NO_SLOTS

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
            return self._forward(self._slots, num_seen, tokens, starts)

    def _starts(self) -> Tensor:
        """Return the next slot of each row [B], on the device."""
        return to_device([length + self._num_extended for length in self._lengths], self._device)

    def _make_room(self, num_rows: int, num_slots: int) -> None:
        """Replace the slots by a copy in larger ones, unless all rows have this many."""
        if not self._slots.have_room(num_rows, num_slots):
            self._slots = self._slots.enlarged(num_rows, round_up(num_slots))

    def _read_prompts(self, prompts: TokenRows) -> tuple[list[Tensor], Sequence[Tensor]]:
        """Run the model over prompts -> in turn the keys and the values of each layer, [B, heads,
        n, D] each, and the tensors of a Step.
        """
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
        for states in hidden:
            rows = [row[:length] for row, length in zip(states, lengths, strict=True)]
            outputs.append(pad_sequence(rows, batch_first=True, padding_side="left"))
        lengths_read = {layer.get_seq_length() for layer in cache.layers}
        if lengths_read != {max(1, *lengths)}:
            raise UnsupportedModelError("does not keep its state in a KV cache")
        keys_and_values: list[Tensor] = []
        for layer in cache.layers:
            keys_and_values += [layer.keys, layer.values]
        return keys_and_values, outputs
