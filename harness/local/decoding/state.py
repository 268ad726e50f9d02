"""The state of a batch's rows on the device: tensors that every iteration reads and writes in place.

The host keeps no counts that could disagree with them: it derives lengths and limits from the tokens that it was given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import torch
from torch import Tensor

from harness.local.decoding.randomness import Purpose
from harness.local.decoding.transfer import to_device

# The index in each row at which a pass begins: numbers that the host knows (None for a row that rests), or a tensor
# [B].
Starts = Sequence[int | None] | Tensor


class Column(IntEnum):
    """A number that the device keeps for each row; indexes `RowState.numbers`.

    The order counts: `RowState.advance` writes PREVIOUS and LAST as one slice, and LENGTH and DECIDED as another.
    """

    # How many tokens the last iteration decided: so many of `RowState.decided` are valid.
    GAINED = 0
    # The last two tokens, of which the target has not read the second. LAST must begin at a multiple of 16 bytes for
    # any number of rows, or a compiled pass copies it first. Row 2 of int64 numbers does.
    PREVIOUS = 1
    LAST = 2
    # How many tokens the target has read. A draft model has read one less, because it begins with the last two.
    LENGTH = 3
    # The number of new tokens so far, which is also the row's position in its random numbers.
    DECIDED = 4
    # The number of new tokens at which the row ends.
    MOST = 5
    ITERATIONS = 6
    # 0 for a row that rests: it has ended, or only fills the batch up. LENGTH then stays, and its last tokens mean
    # nothing.
    RUNNING = 7


@dataclass
class RowState:
    """The rows of a batch, as the two calls of an iteration need them.

    Attributes:
        numbers: [len(Column), B], int64.
        uniforms: [B, P, len(Purpose)], P random numbers of each row for each purpose. A request with fewer leaves
            other numbers after its own, which decide nothing.
        decided: [B, 1 + K], the tokens that the last iteration decided: the accepted ones, and the one after them. The
            first `Column.GAINED` are valid; ignore the others.
        lengths: on the host, `Column.LENGTH` of each row that runs, and None for each row that rests. The loop sets
            them from the rows' tokens before each iteration, so that a pass reads no more slots than the longest row
            has. None, in place of a list, if the calls must be functions of tensors alone, to be compiled or captured.
        num_slots: the slots of each row in the caches of both models.
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
        """Return the state of rows that all rest, with room for K draft tokens."""
        numbers = torch.zeros(len(Column), num_rows, dtype=torch.long, device=device)
        uniforms = torch.zeros(num_rows, num_positions, len(Purpose), device=device)
        decided = numbers.new_zeros(num_rows, 1 + num_draft_tokens)
        state = cls(numbers, uniforms, decided, num_slots=num_slots)
        state.clear()
        return state

    def clear(self) -> None:
        """Let all rows rest. They count as rows that have read one token, so that a draft model's pass, which begins
        one token earlier, has a valid index; and they can be offered no tokens.
        """
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
        """Return these rows for a draft on `device`: the rows themselves if they are on it, else a state that has
        copies of `numbers` and `decided` on it. `uniforms` are not copied.
        """
        if device == self.numbers.device:
            return self
        return replace(self, numbers=self.numbers.to(device), decided=self.decided.to(device))

    def begin(
        self, row: int, prompt: Sequence[int], first_token: int, most: int, uniforms: Tensor
    ) -> None:
        """Let a row begin after its prompt and its first new token, which has been decided.

        Args:
            most: the number of new tokens at which the row ends.
            uniforms: [at most P, len(Purpose)], its random numbers.
        """
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
        """Return the index at which a pass begins in each row: its length plus `ahead`. The index 0 tokens ahead is
        that of the last token, which the target has not read.
        """
        if self.lengths is None:
            return self.numbers[Column.LENGTH] + ahead
        return [None if length is None else length + ahead for length in self.lengths]

    def random(self, purpose: Purpose, starts: Tensor, count: int) -> Tensor:
        """Return `count` random numbers of each row [B, count], beginning with the one at `starts` [B]."""
        places = starts.unsqueeze(1) + torch.arange(count, device=starts.device)
        numbers = self.uniforms[..., purpose]
        # Near its end a row's stream may have fewer. The last number is repeated, for positions that are never decided.
        return numbers.gather(1, places.clamp(max=numbers.shape[1] - 1))

    def advance(self, decided: Tensor, num_accepted: Tensor | None = None) -> None:
        """Append the tokens that were decided to the rows, in place.

        Say a row ends with `a`, the tokens b, c and d were proposed, b was accepted and y follows it. `decided` is
        [b, y, d, y], of which the first two are valid, and `num_accepted` is 1. PREVIOUS becomes b and LAST y; LENGTH
        and DECIDED grow by 2.

        Args:
            decided: [B, 1 + K], the accepted tokens, the one after them, and then tokens to be ignored.
            num_accepted: [B]; None if nothing was proposed, and K is 0.
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
