"""The state of the rows of a batch, on the device: tensors that every iteration reads and writes in place.

The host keeps no counts of its own beside them: what it must know follows from the tokens that its rows have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from harness.local.decoding.randomness import Purpose
from harness.local.decoding.transfer import to_device

# What is on the device, by its names in a state.
_TENSORS = ("tail", "lengths", "decided", "most", "iterations", "running", "uniforms")


@dataclass
class RowState:
    """The rows of a batch, as the two calls of an iteration need them.

    Attributes:
        tail: [B, 2], the last two tokens of each row. The target has not read the second.
        lengths: [B], the tokens that the target has read. A draft model has read one less: it begins with the tail.
        decided: [B], new tokens so far, which is the row's place in its random numbers.
        most: [B], new tokens that end the row.
        iterations: [B], so far.
        running: [B], 0 for rows that only fill a batch of fixed size up: they do not move.
        uniforms: [B, P, len(Purpose)]; behind a shorter request's numbers are zeros that decide nothing.
        is_fixed: whether these tensors, and the caches of both models, stay where they are and as large as they are:
            then the calls are functions of tensors alone, which can be compiled and captured.
        longest: of `lengths`, as the host knows it, for caches that grow.
    """

    tail: Tensor
    lengths: Tensor
    decided: Tensor
    most: Tensor
    iterations: Tensor
    running: Tensor
    uniforms: Tensor
    is_fixed: bool = False
    longest: int = 0

    @classmethod
    def empty(
        cls,
        num_rows: int,
        num_positions: int,
        device: torch.device | str,
        *,
        is_fixed: bool = False,
    ) -> RowState:
        """Return rows that do not run."""

        def zeros(*sizes: int, dtype: torch.dtype = torch.long) -> Tensor:
            return torch.zeros(sizes, dtype=dtype, device=device)

        state = cls(
            tail=zeros(num_rows, 2),
            lengths=zeros(num_rows),
            decided=zeros(num_rows),
            most=zeros(num_rows),
            iterations=zeros(num_rows),
            running=zeros(num_rows),
            uniforms=zeros(num_rows, num_positions, len(Purpose), dtype=torch.float32),
            is_fixed=is_fixed,
        )
        state.rest(0)
        return state

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> RowState:
        """Return the rows of these `tensors`."""
        named: dict[str, Any] = dict(zip(_TENSORS, tensors, strict=True))
        return cls(**named)

    @property
    def tensors(self) -> list[Tensor]:
        """Everything that is on the device."""
        return [getattr(self, name) for name in _TENSORS]

    @property
    def num_rows(self) -> int:
        return len(self.tail)

    def first(self, num_rows: int) -> RowState:
        """Return the first rows, which share their memory with these."""
        if num_rows == self.num_rows:
            return self
        return self._changed(lambda tensor: tensor[:num_rows])

    def enlarged(self, num_rows: int, num_positions: int) -> RowState:
        """Return a copy of other sizes, which is not fixed. New rows do not run."""
        enlarged = RowState.empty(num_rows, num_positions, self.tail.device)
        enlarged.longest = self.longest
        num_kept = min(num_rows, self.num_rows)
        for name in _TENSORS:
            kept = getattr(self, name)[:num_kept]
            if name == "uniforms":
                enlarged.uniforms[:num_kept, : kept.shape[1]] = kept[:, :num_positions]
            else:
                getattr(enlarged, name)[:num_kept] = kept
        return enlarged

    def begin(
        self, row: int, prompt: Sequence[int], first_token: Tensor, most: int, uniforms: Tensor
    ) -> None:
        """Let a row begin behind a prompt, whose first new token [] has been decided."""
        self.tail[row, 0] = prompt[-1]
        self.tail[row, 1] = first_token
        self.lengths[row] = len(prompt)
        self.longest = max(self.longest, len(prompt))
        self.decided[row] = 1
        self.most[row] = most
        self.iterations[row] = 0
        self.running[row] = 1
        self.uniforms[row, : len(uniforms)] = uniforms

    def select(self, rows: Sequence[int]) -> RowState:
        """Return the state of these rows: the same tensors where they are fixed."""
        index = to_device(rows, self.tail.device)
        if not self.is_fixed:
            return self._changed(lambda tensor: tensor[index])
        for tensor in self.tensors:
            tensor[: len(rows)] = tensor[index]
        self.rest(len(rows))
        return self

    def rest(self, first_row: int) -> None:
        """Let the rows from this one on only fill the batch up: they write where no row that runs reads."""
        for counts in (self.running, self.decided, self.iterations):
            counts[first_row:] = 0
        for counts in (self.lengths, self.most):
            counts[first_row:] = 1

    def numbers(self, purpose: Purpose, starts: Tensor, count: int) -> Tensor:
        """Return `count` random numbers of each row, from its place in `starts` [B] on: [B, count]."""
        places = starts.unsqueeze(1) + torch.arange(count, device=starts.device)
        numbers = self.uniforms[..., purpose]
        # A row near its end may not need them all; positions beyond the stream are never decided.
        return numbers.gather(1, places.clamp(max=numbers.shape[1] - 1))

    def advance(self, block: Tensor, num_accepted: Tensor, next_token: Tensor) -> None:
        """Move on, in place.

        Args:
            block: [B, 1 + K], the tokens that the target has just read.
            num_accepted: [B], how many of them were kept behind the first.
            next_token: [B], the token after these.
        """
        last = block.gather(1, num_accepted.unsqueeze(1))
        moved = (num_accepted + 1) * self.running
        self.tail.copy_(torch.cat([last, next_token.unsqueeze(1)], 1))
        self.lengths.add_(moved)
        self.decided.add_(moved)
        self.iterations.add_(1)

    def _changed(self, change: Callable[[Tensor], Tensor]) -> RowState:
        changed: dict[str, Any] = {name: change(getattr(self, name)) for name in _TENSORS}
        return replace(self, **changed)
