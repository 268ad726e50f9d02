"""Drafters without a model: the text of a row alone says what they propose. All of it happens on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from harness.decoding.protocols import Drafter, Proposal, Step
from harness.decoding.transfer import to_device


class Text(Protocol):
    """The tokens of one row, indexed so that a proposal takes the same time after any number of them."""

    def extend(self, tokens: Iterable[int]) -> None:
        """Append decided tokens."""

    def continuation(self, most: int) -> list[int]:
        """Up to `most` tokens that may follow, none without a guess."""


class TextDrafter(Drafter):
    """Proposes deterministically what each row's text says.

    `least` may be set to the number of tokens that a text must have; one with fewer proposes
    nothing. Whether a row has that many does not depend on K, and so not on the other rows.

    Args:
        new_text: makes an empty text.
        device: the target's.
        begin_batch: called before the texts of a new batch are made.
    """

    layers = ()
    reads_verdicts = True
    least = 1

    def __init__(
        self,
        new_text: Callable[[], Text],
        device: torch.device | str = "cpu",
        begin_batch: Callable[[], None] = lambda: None,
    ) -> None:
        self._new_text = new_text
        self._device = device
        self._begin_batch = begin_batch

    def start(
        self, prompts: Sequence[Sequence[int]], first_tokens: Sequence[int], step: Step
    ) -> None:
        self._begin_batch()
        self._rows: list[tuple[Any, list[int]]] = []  # texts, with what was proposed last
        self.add(prompts, first_tokens, step)

    def add(
        self, prompts: Sequence[Sequence[int]], first_tokens: Sequence[int], step: Step
    ) -> None:
        for prompt, first in zip(prompts, first_tokens, strict=True):
            text = self._new_text()
            text.extend([*prompt, first])
            self._rows.append((text, []))

    def propose(self, num_draft_tokens: int, uniforms: Tensor) -> Proposal:
        self._rows = [(text, self._found(text, num_draft_tokens)) for text, _ in self._rows]
        lengths = [len(found) for _, found in self._rows]
        padded = [
            token for _, found in self._rows for token in found + [0] * (max(lengths) - len(found))
        ]
        return Proposal(
            to_device(padded, self._device).view(len(lengths), max(lengths)), None, lengths
        )

    def _found(self, text: Text, most: int) -> list[int]:
        found = text.continuation(max(most, self.least))
        return found[:most] if len(found) >= self.least else []

    def replace(self, tokens: Tensor) -> None:
        """Learn that tokens [B, K] are proposed, whoever guessed them."""
        self._rows = [
            (text, row) for (text, _), row in zip(self._rows, tokens.tolist(), strict=True)
        ]

    def observe(self, num_accepted: Sequence[int], next_tokens: Sequence[int], step: Step) -> None:
        for (text, found), count, token in zip(self._rows, num_accepted, next_tokens, strict=True):
            text.extend([*found[:count], token])

    def select(self, rows: Sequence[int]) -> None:
        self._rows = [self._rows[row] for row in rows]
