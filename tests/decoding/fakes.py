"""A runner whose model is a table: the distribution after a token depends on that token alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class MarkovRunner:
    """A `Runner` over transition probabilities [V, V]. It checks that it is fed what it was told was kept."""

    def __init__(self, transitions: Tensor) -> None:
        self._logits = transitions.log()
        self.rows: list[list[int]] = []
        self._num_extended = 0
        self.num_calls = 0

    def start(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        self.rows = [list(prompt) for prompt in prompts]
        self._num_extended = 0
        return self._logits[torch.tensor([row[-1] for row in self.rows])]

    def extend(self, tokens: Tensor) -> Tensor:
        self.num_calls += 1
        for row, new in zip(self.rows, tokens.tolist(), strict=True):
            row += new
        self._num_extended += tokens.shape[1]
        return self._logits[tokens]

    def keep(self, counts: Sequence[int]) -> None:
        for row, count in zip(self.rows, counts, strict=True):
            assert 0 <= count <= self._num_extended
            del row[len(row) - self._num_extended + count :]
        self._num_extended = 0

    def select(self, rows: Sequence[int]) -> None:
        assert self._num_extended == 0
        self.rows = [self.rows[row] for row in rows]
