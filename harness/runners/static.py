"""A runner whose KV cache has a fixed size: every row keeps its own slots, and a roll-back only moves lengths.

Nothing depends on what was said before but numbers on the device, so that forward passes of one shape can be compiled
and captured (`runners.compiled`). This runner itself runs the model eagerly, on any shape.
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
from harness.runners.eager import EagerRunner, RollbackError
from harness.runners.slots import SlotForward, Slots, UnsupportedModelError

# Slots are allocated in multiples of this.
BUCKET = 128

# Relative error of logits against the eager runner's that is more than rounding: float32, and everything coarser.
_TOLERANCE, _COARSE_TOLERANCE = 1e-3, 0.1


class StaticRunner:
    """A `Runner` over any transformers model on one device that takes explicit positions and masks.

    Args:
        model: in evaluation mode.
        vocabulary_size: logits are cut to this width.
        device: where tokens go in and logits come out; the model's own by default.

    Raises:
        UnsupportedModelError: if the model needs the eager runner.
    """

    def __init__(
        self, model: PreTrainedModel, *, vocabulary_size: int | None = None, device: torch.device | None = None
    ) -> None:
        places = {str(place) for place in getattr(model, "hf_device_map", {}).values()}
        if len(places) > 1 or "disk" in places:
            raise UnsupportedModelError(f"lies on {', '.join(sorted(places))}")
        self._model = model
        self._vocabulary_size = vocabulary_size
        self._device = device or model.device
        self._forward = SlotForward(model, vocabulary_size)
        self._takes_logits_to_keep = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._slots = Slots([], [], 0, 0)
        self._starts = torch.empty(0, dtype=torch.long)  # [rows of _slots] on the device: where each row goes on
        self._lengths: list[int] = []  # kept tokens of each row
        self._num_extended = 0  # since the last keep

    @torch.inference_mode()
    def start(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """See `Runner.start`. Raises RollbackError if the model leaves no trace in the cache."""
        if not prompts or not all(prompts):
            raise ValueError("every prompt needs at least one token")
        logits, layers = self._read(prompts)
        self._lengths = [len(prompt) for prompt in prompts]
        self._num_extended = 0
        self._slots = self._allocate(layers, len(prompts), max(self._lengths))
        self._slots.first_rows(len(prompts)).read(layers)
        self._starts = torch.zeros(self._slots.num_rows, dtype=torch.long, device=self._device)
        self._move()
        return logits

    @torch.inference_mode()
    def extend(self, tokens: Tensor) -> Tensor:
        """See `Runner.extend`."""
        num_rows, num_tokens = tokens.shape
        if not self._fits(num_tokens):
            self._grow(num_tokens)
        num_real = torch.full((), num_tokens, device=self._device)
        logits = self._forward(self._slots.first_rows(num_rows), tokens, self._starts[:num_rows], num_real)
        self._advance(num_tokens)
        return logits

    @torch.inference_mode()
    def keep(self, counts: Sequence[int]) -> None:
        """See `Runner.keep`."""
        if not all(0 <= count <= self._num_extended for count in counts):
            raise ValueError(f"cannot keep {list(counts)} of {self._num_extended} tokens")
        self._lengths = [length + count for length, count in zip(self._lengths, counts, strict=True)]
        taken_back = min(counts) < self._num_extended
        self._num_extended = 0
        if taken_back:
            self._move()

    @torch.inference_mode()
    def select(self, rows: Sequence[int]) -> None:
        """See `Runner.select`."""
        if self._num_extended:
            raise ValueError("keep what was extended before selecting rows")
        if list(rows) != list(range(len(rows))):
            self._slots.select(to_device(rows, self._device))
        self._lengths = [self._lengths[row] for row in rows]
        self._move()

    @torch.inference_mode()
    def check(self) -> None:
        """Hold the logits against the eager runner's, over two ragged rows and a roll-back.

        Raises:
            UnsupportedModelError: if more than rounding parts them, or the model refuses its masks.
        """
        eager = EagerRunner(self._model, vocabulary_size=self._vocabulary_size, device=self._device)
        plain = StaticRunner(self._model, vocabulary_size=self._vocabulary_size, device=self._device)
        fed = torch.arange(20, 26, device=self._device).view(2, 3)

        def logits(runner: EagerRunner | StaticRunner) -> Tensor:
            runner.start([[11, 12, 13, 14, 15], [16, 17]])
            first = runner.extend(fed)
            runner.keep([1, 3])
            return torch.cat([first, runner.extend(fed[:, :2])], dim=1).float()

        expected = logits(eager)
        try:
            actual = logits(plain)
        except Exception as error:  # whatever a model does with positions and masks it was not written for
            raise UnsupportedModelError(f"fails with explicit masks: {first_line(error)}") from error
        require_close(actual, expected, self._model, "differ from the eager ones")

    def _read(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, list[Any]]:
        """Logits [B, V] after each prompt, and the layers of a cache: of one row where all prompts are alike."""
        # Many samples of one prompt: it is read once.
        read = prompts[:1] if all(prompt == prompts[0] for prompt in prompts) else prompts
        cache, width = DynamicCache(), max(map(len, read))
        # Padding follows a prompt, which so never sees it: positions and masks are the model's own.
        tokens = torch.tensor(
            [[*prompt, *list(prompt[-1:]) * (width - len(prompt))] for prompt in read], device=self._device
        )
        lasts = [len(prompt) - 1 for prompt in read]
        arguments: dict[str, Any] = {}
        if self._takes_logits_to_keep:
            ends = sorted(set(lasts))
            arguments["logits_to_keep"] = to_device(ends, self._device)
            lasts = [ends.index(last) for last in lasts]
        logits = self._model(input_ids=tokens, past_key_values=cache, use_cache=True, **arguments).logits
        layers: list[Any] = cache.layers
        if not layers or not all(type(layer) is DynamicLayer and layer.get_seq_length() == width for layer in layers):
            raise RollbackError(f"{type(self._model).__name__} does not keep its state in a KV cache")
        rows = torch.arange(len(read), device=self._device)
        logits = logits[rows, to_device(lasts, self._device), : self._vocabulary_size]
        return logits.expand(len(prompts), -1), layers

    def _allocate(self, layers: Sequence[Any], num_rows: int, longest: int) -> Slots:
        """Slots for a new batch whose longest prompt has so many tokens."""
        states = [(layer.keys, layer.values) for layer in layers]
        return Slots.like(states, num_rows, round_up(longest + 1))

    def _grow(self, num_tokens: int) -> None:
        num_rows = len(self._lengths)
        num_slots = round_up(2 * (max(self._lengths) + self._num_extended + num_tokens))
        self._slots = self._slots.first_rows(num_rows).copied_to(num_slots)
        self._starts = self._starts[:num_rows].clone()

    def _fits(self, num_tokens: int) -> bool:
        return max(self._lengths) + self._num_extended + num_tokens <= self._slots.num_slots

    def _move(self) -> None:
        """Tell the device where each row goes on; those that have ended write where nobody reads."""
        ended = [0] * (self._slots.num_rows - len(self._lengths))
        self._starts.copy_(to_device(self._lengths + ended, self._device))

    def _advance(self, num_tokens: int) -> None:
        self._num_extended += num_tokens
        self._starts[: len(self._lengths)] += num_tokens


def round_up(num_slots: int) -> int:
    """To whole buckets."""
    return -(-num_slots // BUCKET) * BUCKET


def first_line(error: Exception) -> str:
    """What an error says, in one line."""
    return f"{type(error).__name__}: {error}".strip().splitlines()[0][:200]


def require_close(actual: Tensor, expected: Tensor, model: PreTrainedModel, otherwise: str) -> None:
    """Raises UnsupportedModelError, with `otherwise`, if logits are further apart than rounding explains."""
    error = float((actual.float() - expected.float()).norm() / expected.float().norm())
    precise = model.dtype == torch.float32 and getattr(model, "hf_quantizer", None) is None
    if not error < (_TOLERANCE if precise else _COARSE_TOLERANCE):
        raise UnsupportedModelError(f"gives logits that {otherwise} by {error:.1%}")
