"""Draft models, which draft token by token."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from harness.local.decoding.protocols import Proposal, Runner, Step, TensorDrafter, TokenRows
from harness.local.decoding.randomness import existing_index
from harness.local.decoding.state import Column, RowState
from harness.local.decoding.warp import AnyWarp
from harness.local.runners.compiled import Part, end_part

# The widths of a draft model's passes, in tokens.
WIDTHS = (1, 2)


class ModelDrafter(TensorDrafter):
    """Proposes by running a draft model, token by token.

    The runner's cache lacks the last two tokens of each row, its tail, with which every proposal begins. Say the text
    ends with `a x`, and b, c and d are drawn: `a x` and b and c were fed, but never d itself. Whatever is accepted,
    the cache then keeps one token more than the accepted ones, and lacks the last two again:

        accepted b, then y         the cache has `a x`, and lacks `b y`
        accepted b, c, d, then y   the cache has `a x b c`, and lacks `d y`

    Args:
        runner: of the draft model.
        warp: also applied to the target's logits.
    """

    layers = ()

    def __init__(self, runner: Runner, warp: AnyWarp) -> None:
        self.runner = runner
        self.warp = warp
        self._num_slots = 0
        self._draw = Part(functools.partial(_draw, warp), key=lambda: warp.kind)

    def make_room(self, num_rows: int, num_draft_tokens: int, num_slots: int) -> None:
        self._num_slots = num_slots

    def start(self, prompts: TokenRows, first_tokens: Sequence[int], step: Step) -> None:
        begun = self.runner.start([prompt[:-1] for prompt in prompts], self._num_slots)
        self.device = begun.logits.device

    def draft(self, rows: RowState, uniforms: Tensor) -> Proposal:
        tail = [rows.numbers[Column.PREVIOUS], rows.numbers[Column.LAST]]
        tokens = torch.stack(tail, 1)
        drawn: list[Tensor] = []
        distributions: list[Tensor] = []
        for number, numbers in enumerate(uniforms.split(1, dim=1)):
            # Counted from the place of LAST: the first pass begins one before it, with the tail, the second behind it.
            starts = rows.starts(-1 if number == 0 else number)
            logits = self.runner.extend(tokens, starts, goes_on=number > 0).logits
            # Of the same layout behind two tokens as behind one, so that drawing is compiled once.
            last = logits[:, -1].flatten().view(len(logits), -1)
            tokens, probabilities = self._draw(last, numbers)
            drawn.append(tokens)
            distributions.append(probabilities)
            end_part()
        return Proposal(torch.cat(drawn, 1), torch.stack(distributions, 1))


def _draw(warp: AnyWarp, logits: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Draw by logits [B, V] with uniforms [B, 1] -> tokens [B, 1], and what they are drawn from, [B, V]."""
    probabilities = warp(logits)
    return existing_index(probabilities, uniforms), probabilities
