"""Drafting without a model: what a row's own text, prompt and answer, says that may follow.

`lookup` and `suffix` (`local/drafting/methods/`) are two kinds of `Text`. All of it happens on the host.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from harness.local.decoding.protocols import Drafter, Proposal, Step
from harness.local.decoding.transfer import padded, to_device


class Text(Protocol):
    """The tokens of one row, indexed so that a proposal takes the same time after any number of
    them.
    """

    def extend(self, tokens: Iterable[int]) -> None:
        """Append decided tokens."""

    def continuation(self, most: int) -> list[int]:
        """Return up to `most` tokens that may follow; none without a guess."""


class TextDrafter(Drafter):
    """Proposes what each row's text says, which is deterministic.

    Args:
        new_text: makes the empty text of a row.
        device: the target's, where proposals are used.
        begin_batch: called before the texts of a new batch are made.
    """

    layers = ()

    def __init__(
        self,
        new_text: Callable[[], Text],
        device: torch.device | str = "cpu",
        begin_batch: Callable[[], None] = lambda: None,
    ) -> None:
        self.new_text = new_text
        self._device = device
        self._begin_batch = begin_batch
        self._texts: list[Text] = []
        self._proposed: list[list[int]] = []
        self._propose_nothing()

    def start(
        self, prompts: Sequence[Sequence[int]], first_tokens: Sequence[int], step: Step
    ) -> None:
        self._begin_batch()
        self._texts = []
        self.add(prompts, first_tokens, step)

    def add(
        self, prompts: Sequence[Sequence[int]], first_tokens: Sequence[int], step: Step
    ) -> None:
        for prompt, first in zip(prompts, first_tokens, strict=True):
            text = self.new_text()
            text.extend([*prompt, first])
            self._texts.append(text)
        self._propose_nothing()

    def propose(self, num_draft_tokens: int, uniforms: Tensor) -> Proposal:
        proposed = [text.continuation(num_draft_tokens) for text in self._texts]
        self._proposed = proposed
        lengths = [len(guess) for guess in proposed]
        width = max(lengths)
        # One flat list is what `to_device` copies fastest.
        tokens = list(itertools.chain.from_iterable(padded(proposed, width)))
        return Proposal(to_device(tokens, self._device).view(len(lengths), width), None, lengths)

    def _propose_nothing(self) -> None:
        self._proposed = [[] for _ in self._texts]

    def observe(self, num_accepted: Sequence[int], next_tokens: Sequence[int], step: Step) -> None:
        decided = zip(self._texts, self._proposed, num_accepted, next_tokens, strict=True)
        for text, proposed, count, token in decided:
            text.extend([*proposed[:count], token])
        self._propose_nothing()

    def select(self, rows: Sequence[int]) -> None:
        self._texts = [self._texts[row] for row in rows]
        self._propose_nothing()
