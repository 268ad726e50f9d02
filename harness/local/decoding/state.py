"""The state of the rows of a batch, on the device: tensors that every iteration reads and writes in place.

The host keeps no counts of its own beside them: what it must know follows from the tokens that its rows have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import torch
from torch import Tensor

from harness.local.decoding.randomness import Purpose
from harness.local.decoding.transfer import to_device

# Where the tokens of each row are read: numbers that the host knows, None for a row that rests; or a tensor [B].
Starts = Sequence[int | None] | Tensor


class Column(IntEnum):
    """A number that the device knows of each row; indexes `RowState.numbers`. `advance` writes PREVIOUS and LAST
    together, and LENGTH and DECIDED.
    """

    # Tokens that the last iteration decided, of `RowState.decided`.
    GAINED = 0
    # The last two tokens. The target has not read the second. LAST begins at a multiple of 16 bytes for any number of
    # rows: a compiled pass would copy it from any other place.
    PREVIOUS = 1
    LAST = 2
    # Tokens that the target has read. A draft model has read one less: it begins with the last two.
    LENGTH = 3
    # New tokens so far, which is the row's place in its random numbers.
    DECIDED = 4
    # The number of new tokens at which the row ends.
    MOST = 5
    ITERATIONS = 6
    # 0 for a row that rests: it has ended, or only fills the batch up. Its length stays; its last tokens mean nothing.
    RUNNING = 7


@dataclass
class RowState:
    """The rows of a batch, as the two calls of an iteration need them.

    Attributes:
        numbers: [len(Column), B], int64.
        uniforms: [B, P, len(Purpose)], P of each row for each purpose; behind a shorter request's are zeros that decide
            nothing.
        decided: [B, 1 + K], the tokens of the last iteration: the accepted ones and the one that follows; what is
            behind them is to be ignored.
        lengths: `Column.LENGTH` of the rows that run, None of those that rest, which the loop fills in by the rows'
            tokens: a pass that knows them reads no more slots than the longest has. None where the calls are functions
            of tensors alone, which can be compiled and captured.
        num_slots: of each row in the caches of both models.
    """

    numbers: Tensor
    uniforms: Tensor
    decided: Tensor
    lengths: list[int | None] | None = None
    num_slots: int = 0

    @classmethod
    def resting(
        cls,
        num_rows: int,
        num_positions: int,
        num_draft_tokens: int,
        device: torch.device | str,
        num_slots: int = 0,
    ) -> RowState:
        """Return rows that rest, with room for K draft tokens."""
        numbers = torch.zeros(len(Column), num_rows, dtype=torch.long, device=device)
        uniforms = torch.zeros(num_rows, num_positions, len(Purpose), device=device)
        decided = numbers.new_zeros(num_rows, 1 + num_draft_tokens)
        state = cls(numbers, uniforms, decided, num_slots=num_slots)
        state.clear()
        return state

    def clear(self) -> None:
        """Let all rows rest: one token was read, and nothing is offered."""
        self.numbers.zero_()
        self.numbers[Column.LENGTH] = 1
        self.numbers[Column.MOST] = 1

    @property
    def num_rows(self) -> int:
        return self.numbers.shape[1]

    @property
    def last(self) -> Tensor:
        """The last token of each row, [B, 1]."""
        return self.numbers[Column.LAST].unsqueeze(1)

    def on(self, device: torch.device) -> RowState:
        """Return what a draft on a device must know of these rows: the rows themselves if they are there, else others
        with copies of `numbers` and `decided` there.
        """
        if device == self.numbers.device:
            return self
        return replace(self, numbers=self.numbers.to(device), decided=self.decided.to(device))

    def begin(
        self, row: int, prompt: Sequence[int], first_token: int, most: int, uniforms: Tensor
    ) -> None:
        """Let a row begin behind a prompt, whose first new token has been decided."""
        begun = {
            Column.PREVIOUS: prompt[-1],
            Column.LAST: first_token,
            Column.LENGTH: len(prompt),
            Column.DECIDED: 1,
            Column.MOST: most,
            Column.ITERATIONS: 0,
            Column.RUNNING: 1,
            Column.GAINED: 1,
        }
        self.numbers[:, row] = torch.tensor([begun[column] for column in Column])
        self.decided[row, 0] = first_token
        self.uniforms[row, : len(uniforms)] = uniforms

    def rest(self, rows: Sequence[int]) -> None:
        """Let rows that have ended rest where they are."""
        self.numbers[Column.RUNNING, to_device(rows, self.numbers.device)] = 0

    def starts(self, ahead: int = 0) -> Starts:
        """Return where each row is read that many tokens behind its length."""
        if self.lengths is None:
            return self.numbers[Column.LENGTH] + ahead
        return [None if length is None else length + ahead for length in self.lengths]

    def random(self, purpose: Purpose, starts: Tensor, count: int) -> Tensor:
        """Return `count` random numbers of each row, from its place in `starts` [B] on: [B, count]."""
        places = starts.unsqueeze(1) + torch.arange(count, device=starts.device)
        numbers = self.uniforms[..., purpose]
        # A row near its end may not need them all; positions beyond the stream are never decided.
        return numbers.gather(1, places.clamp(max=numbers.shape[1] - 1))

    def advance(self, decided: Tensor, num_accepted: Tensor | None = None) -> None:
        """Move on, in place.

        Args:
            decided: [B, 1 + K], the accepted tokens and the one that follows.
            num_accepted: [B]; None where nothing was proposed.
        """
        gained = running = self.numbers[Column.RUNNING]
        # The two tokens at the end of each row.
        tail = torch.cat([self.last, decided], 1)
        if num_accepted is not None:
            gained = (num_accepted + 1) * running
            place = num_accepted.unsqueeze(1)
            tail = tail.gather(1, torch.cat([place, place + 1], 1))
        self.numbers[Column.PREVIOUS : Column.LENGTH] = tail.T
        self.numbers[Column.LENGTH : Column.MOST] += gained
        self.numbers[Column.ITERATIONS] += running
        self.numbers[Column.GAINED] = gained
        self.decided[:, : decided.shape[1]] = decided
