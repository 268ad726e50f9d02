"""Drafters without a model: the text of a row alone says what they propose. All of it happens on the host."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from harness.decoding.protocols import Drafter, Proposal, Step
from harness.decoding.transfer import to_device


class Text(Protocol):
    """The tokens of one row, indexed so that a proposal takes the same time after any number of them."""

    def extend(self, tokens: Iterable[int]) -> None:
        """Append decided tokens."""
        ...

    def continuation(self, most: int) -> list[int]:
        """Up to `most` tokens that may follow, none without a guess."""
        ...


T = TypeVar("T", bound=Text)


class TextDrafter(Drafter, Generic[T]):
    """Proposes deterministically, for each row what its `Text` says; `device` is the target's."""

    layers = ()

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = device
        self._rows: list[T] = []
        self._proposed: list[list[int]] = []

    @abstractmethod
    def _new_text(self) -> T:
        """The empty text of one row."""

    def start(self, prompts: Sequence[Sequence[int]], first_tokens: Sequence[int], step: Step) -> None:
        self._rows, self._proposed = [], []
        self.add(prompts, first_tokens, step)

    def add(self, prompts: Sequence[Sequence[int]], first_tokens: Sequence[int], step: Step) -> None:
        for prompt, first in zip(prompts, first_tokens, strict=True):
            text = self._new_text()
            text.extend([*prompt, first])
            self._rows.append(text)
            self._proposed.append([])

    def propose(self, num_draft_tokens: int, uniforms: Tensor) -> Proposal:
        self._proposed = [row.continuation(num_draft_tokens) for row in self._rows]
        lengths = list(map(len, self._proposed))
        padded = [token for row in self._proposed for token in row + [0] * (max(lengths) - len(row))]
        return Proposal(to_device(padded, self._device).long().view(len(lengths), max(lengths)), None, lengths)

    def observe(self, num_accepted: Sequence[int], next_tokens: Sequence[int], step: Step) -> None:
        for row, proposed, count, token in zip(self._rows, self._proposed, num_accepted, next_tokens, strict=True):
            row.extend([*proposed[:count], token])

    def select(self, rows: Sequence[int]) -> None:
        self._rows = [self._rows[row] for row in rows]
        self._proposed = [self._proposed[row] for row in rows]
