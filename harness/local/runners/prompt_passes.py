"""Prompts of a new batch read by prepared passes, one for each bucket of lengths.

An eager pass over a short prompt takes a GPU as long as launching its kernels takes the host. A
captured one is filled up to its bucket: what follows a prompt is written to slots that do not
count, and no token of the prompt attends to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from harness.local.decoding.transfer import padded, to_device
from harness.local.runners.base import right_aligned
from harness.local.runners.sizes import filled_up
from harness.local.runners.slots import SlotForward, Slots

_SHORTEST = 32
# A pass over more tokens keeps a GPU busy for longer than the host launches its kernels.
_MOST_TOKENS = 1024


def buckets(longest_prompt: int, num_rows: int, num_slots: int) -> list[int]:
    """Return the numbers of tokens that passes over prompts are prepared for, ascending."""
    found: list[int] = []
    width = _SHORTEST
    while width * num_rows <= _MOST_TOKENS and width <= num_slots:
        found.append(width)
        if width >= longest_prompt:
            break
        width *= 2
    return found


class PromptInputs(NamedTuple):
    """The inputs of a pass over prompts: tokens [B, n], filled up, and how many of each row count,
    lengths [B].
    """

    tokens: Tensor
    lengths: Tensor

    def moved(self) -> PromptInputs:
        """Return other inputs of the same shapes, of which a call has other outputs. Each length is
        one more.
        """
        return PromptInputs(self.tokens + 1, self.lengths + 1)


class PromptPass:
    """A pass over the prompts of a new batch, as a function of tensors alone.

    Args:
        slots: of the batch, whose first ones it fills.
    """

    def __init__(self, forward: SlotForward, slots: Slots) -> None:
        self._forward = forward
        self._slots = slots

    def __call__(self, tokens: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
        """Read tokens [B, n], of which the first lengths [B] of each row count -> logits [B, V]
        after these; if layers are captured, also the states [B, n, L, D] of all.
        """
        starts = torch.zeros_like(lengths)
        return self._forward(self._slots, tokens, starts, lengths.max(), last_places=lengths - 1)


def example(num_rows: int, width: int, device: torch.device) -> PromptInputs:
    """Return inputs of a `PromptPass` that is only compared; each length may be one more."""
    tokens = torch.arange(num_rows * width, device=device).view(num_rows, width) % 16
    return PromptInputs(tokens, torch.full((num_rows,), width - 1, device=device))


def inputs(
    prompts: Sequence[Sequence[int]], num_rows: int, width: int, device: torch.device
) -> PromptInputs:
    """Return prompts as inputs of a `PromptPass` with this number of rows and tokens."""
    tokens = to_device(padded(prompts, width), device)
    missing = num_rows - len(prompts)
    lengths = [*map(len, prompts), *[1] * missing]
    return PromptInputs(filled_up(tokens, num_rows), to_device(lengths, device))


def outputs(results: Sequence[Tensor], lengths: Sequence[int]) -> list[Tensor]:
    """Return the tensors of a `Step` for the first rows, whose prompts have these lengths."""
    logits, *states = (result[: len(lengths)] for result in results)
    longest = max(lengths)
    return [logits, *(right_aligned(one[:, :longest], lengths) for one in states)]
