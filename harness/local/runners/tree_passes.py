"""Passes over trees as functions of tensors alone, so that they can be compiled and captured.

A tree is read whole, or in parts of one level after the other. A prepared pass reads a fixed number
of tokens of a tree of at most a fixed size; fewer are filled up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from harness.local.decoding.decisions import Decision
from harness.local.decoding.trees import TreeShape
from harness.local.runners.sizes import filled_up
from harness.local.runners.slots import SlotForward, Slots, TreePart


class TreeDemand(NamedTuple):
    """The passes over trees that a runner is prepared for.

    Attributes:
        widths: the numbers of tokens that a pass reads, ascending; none for no trees.
        most_tokens: the most tokens of a tree, its root included. A draft's tree begins with all
            tokens that the draft has not read, so it may be one more.
        decisions: what may be decided after a pass over a whole tree of that size.
    """

    widths: Sequence[int] = ()
    most_tokens: int = 0
    decisions: Sequence[Decision] = ()


class TreeInputs(NamedTuple):
    """The inputs of a pass over parts of trees: tokens [B, n], filled up, the slots starts [B] of
    the first of them, and the fields of a `TreePart`.
    """

    tokens: Tensor
    starts: Tensor
    num_before: Tensor
    depths: Tensor
    own_depths: Tensor
    visible: Tensor

    def moved(self) -> TreeInputs:
        """Return other inputs of the same shapes, of which a call has other outputs."""
        return self._replace(tokens=self.tokens + 1, starts=self.starts + 1)


class TreePass:
    """A forward pass over parts of trees."""

    def __init__(self, forward: SlotForward, slots: Slots) -> None:
        self._forward = forward
        self._slots = slots

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Read the tokens of these `TreeInputs` into the slots; returns what `base.run_model`
        does.
        """
        given = TreeInputs(*tensors)
        part = TreePart(
            num_before=given.num_before,
            depths=given.depths,
            own_depths=given.own_depths,
            visible=given.visible,
        )
        return self._forward(self._slots, given.tokens, given.starts, tree=part)


def inputs(
    tokens: Tensor, starts: Tensor, shape: TreeShape, width: int, most_tokens: int
) -> TreeInputs:
    """Return the inputs of a `TreePass` over `width` tokens of trees of `most_tokens`.

    Args:
        tokens: [B, n], the last ones of each tree; n is at most `width`.
        starts: [B or more], the slots of the first of them; more rows fill a batch up.
    """
    num_rows = len(starts)
    part = TreePart.of(shape, tokens.shape[1], tokens.device)
    return TreeInputs(
        tokens=filled_up(tokens, num_rows, width),
        starts=starts,
        num_before=torch.full((), int(part.num_before), device=tokens.device),
        depths=filled_up(part.depths, num_rows, most_tokens),
        own_depths=filled_up(part.own_depths, num_rows, width),
        visible=filled_up(part.visible, num_rows, width, most_tokens),
    )


def example(num_rows: int, width: int, most_tokens: int, device: torch.device) -> TreeInputs:
    """Return inputs of a `TreePass` that is only compared: the root and its children."""
    tokens = torch.arange(num_rows * width, device=device).view(num_rows, width) % 16
    starts = torch.zeros(num_rows, dtype=torch.long, device=device)
    shape = TreeShape([(0,) * (width - 1)] * num_rows)
    return inputs(tokens, starts, shape, width, most_tokens)
