"""Drafts with a draft model, token by token."""

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

# The widths of a draft model's passes, in tokens per row. The first pass of a proposal reads two tokens, each later
# pass reads one.
WIDTHS = (1, 2)


class ModelDrafter(TensorDrafter):
    """Proposes by running a draft model, token by token.

    Before each proposal, the draft model has read all tokens of a row except the last two. The first pass of the
    proposal reads these two. Suppose that the text ends with `a x`, and that b, c and d are drawn. The draft model
    reads `a x`, then b, then c, but not d. However many of them are accepted, the next proposal begins by reading the
    last two tokens of the new text:

        text so far   accepted   next token   the cache keeps   the next proposal begins with
        ... a x       b          y            ... a x           b y
        ... a x       b c d      y            ... a x b c       d y

    Args:
        runner: the draft model's runner.
        warp: how the draft model's logits become probabilities: the target's warp, or temperature 0 if draft tokens are
            chosen greedily.
    """

    layers = ()

    def __init__(self, runner: Runner, warp: AnyWarp) -> None:
        self.runner = runner
        self.warp = warp
        self._num_slots = 0
        # A `Part` may be compiled. What `_draw` computes depends on the kind of warp, so each kind has its own version.
        self._draw = Part(functools.partial(_draw, warp), key=lambda: warp.kind)

    def make_room(self, num_rows: int, num_draft_tokens: int, num_slots: int) -> None:
        # `runner.start` allocates the cache, and needs no other number.
        self._num_slots = num_slots

    def start(self, prompts: TokenRows, first_tokens: Sequence[int], step: Step) -> None:
        # The first proposal begins by reading the last two tokens: the prompt's last, and the first new token.
        begun = self.runner.start([prompt[:-1] for prompt in prompts], self._num_slots)
        self.device = begun.logits.device

    def draft(self, rows: RowState, uniforms: Tensor) -> Proposal:
        tokens = torch.stack([rows.numbers[Column.PREVIOUS], rows.numbers[Column.LAST]], 1)
        drawn: list[Tensor] = []
        distributions: list[Tensor] = []
        for num_drawn, uniform in enumerate(uniforms.split(1, dim=1)):
            # `starts` takes the distance from the index of LAST. The first pass begins one before LAST, the second
            # one after LAST, the third two after.
            starts = rows.starts(-1 if num_drawn == 0 else num_drawn)
            # `goes_on`: all passes of a proposal count as one, so the next proposal may roll all of them back.
            logits = self.runner.extend(tokens, starts, goes_on=num_drawn > 0).logits
            # `view` gives the logits the same memory layout after a pass of two tokens as after a pass of one, so that
            # the code that draws is compiled only once.
            last = logits[:, -1].flatten().view(len(logits), -1)
            tokens, probabilities = self._draw(last, uniform)
            drawn.append(tokens)
            distributions.append(probabilities)
            # If this call is being compiled, its K equal steps become K parts with the same code.
            end_part()
        return Proposal(torch.cat(drawn, 1), torch.stack(distributions, 1))


def _draw(warp: AnyWarp, logits: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Draw one token per row, according to logits [B, V], with uniform random numbers [B, 1]. Returns the tokens
    [B, 1], and the probabilities [B, V] that they were drawn from.
    """
    probabilities = warp(logits)
    return existing_index(probabilities, uniforms), probabilities
