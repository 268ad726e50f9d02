"""The state of a batch's rows on the device: tensors that every iteration reads and writes in place.

The host computes its lengths and limits from the tokens that it has received, and keeps no other counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import torch
from torch import Tensor

from harness.local.decoding.randomness import Purpose
from harness.local.decoding.transfer import to_device

# For each row, the index at which a pass begins: either numbers that the host knows, with None for a row that rests, or
# a tensor [B].
Starts = Sequence[int | None] | Tensor


class Column(IntEnum):
    """A number that the device keeps for each row: an index of the first dimension of `RowState.numbers`.

    The order matters: `RowState.advance` writes PREVIOUS and LAST as one slice, and LENGTH and DECIDED as another.
    """

    # How many tokens the last iteration decided. This many entries of `RowState.decided` are valid.
    GAINED = 0
    # The last two tokens. The target has read PREVIOUS, but not LAST. With any number of rows, the numbers LAST must
    # begin at a multiple of 16 bytes, or a compiled pass copies them first. At index 2 of 8-byte numbers they do.
    PREVIOUS = 1
    LAST = 2
    # How many tokens the target has read. A draft model has read one token less, because its next proposal begins by
    # reading the last two.
    LENGTH = 3
    # The number of new tokens so far, which is also the row's position in its random numbers.
    DECIDED = 4
    # The number of new tokens at which the row ends.
    MOST = 5
    # The number of iterations so far.
    ITERATIONS = 6
    # 1 for a row that runs, 0 for a row that rests: it has ended, or only fills the batch up. While a row rests, LENGTH
    # stays the same, and PREVIOUS and LAST are meaningless.
    RUNNING = 7


@dataclass
class RowState:
    """The state of a batch's rows that the two calls of an iteration need.

    Attributes:
        numbers: [len(Column), B], int64.
        uniforms: [B, P, len(Purpose)], P random numbers of each row for each purpose. If a request has fewer, the
            numbers after them are left over from other requests, and decide nothing.
        decided: [B, 1 + K], the tokens that the last iteration decided: the accepted tokens, and the token after them.
            In each row, the first `Column.GAINED` entries are valid; the others must be ignored.
        lengths: a list on the host, with `Column.LENGTH` for each row that runs, and None for each row that rests. The
            loop sets it before each iteration, so that a pass reads only as many slots as the longest row has. None
            instead of a list if the calls are compiled or captured, and so must be functions of tensors only.
        num_slots: the number of slots of each row in the caches of both models.
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
        """Return a state in which all rows rest, with room for `num_positions` random numbers and K draft tokens."""
        numbers = torch.zeros(len(Column), num_rows, dtype=torch.long, device=device)
        uniforms = torch.zeros(num_rows, num_positions, len(Purpose), device=device)
        decided = numbers.new_zeros(num_rows, 1 + num_draft_tokens)
        state = cls(numbers, uniforms, decided, num_slots=num_slots)
        state.clear()
        return state

    def clear(self) -> None:
        """Let all rows rest.

        They count as rows that have read one token, because a draft model's pass begins one token earlier and needs a
        valid index. Their limits do not allow any draft token.
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
        """Return these rows for a draft on `device`: this object if it is on that device, otherwise a state with copies
        of `numbers` and `decided` on the device. `uniforms` is not copied, because a draft gets its random numbers as
        an argument.
        """
        if device == self.numbers.device:
            return self
        return replace(self, numbers=self.numbers.to(device), decided=self.decided.to(device))

    def begin(
        self, row: int, prompt: Sequence[int], first_token: int, most: int, uniforms: Tensor
    ) -> None:
        """Set the state of a row for which only the first new token has been decided.

        Args:
            prompt: the token ids of the row's prompt.
            first_token: the first new token.
            most: the number of new tokens at which the row ends.
            uniforms: [at most P, len(Purpose)], the row's random numbers.
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
        """Let rows that have ended rest."""
        self.numbers[Column.RUNNING, to_device(rows, self.numbers.device)] = 0

    def starts(self, ahead: int = 0) -> Starts:
        """Return, for each row, the index at which a pass begins: `Column.LENGTH` plus `ahead`. With ahead=0, it is the
        index of the row's last token, which the target has not read.
        """
        if self.lengths is None:
            return self.numbers[Column.LENGTH] + ahead
        return [None if length is None else length + ahead for length in self.lengths]

    def random(self, purpose: Purpose, starts: Tensor, count: int) -> Tensor:
        """Return `count` random numbers of each row, [B, count], beginning at the indices `starts` [B]."""
        indices = starts.unsqueeze(1) + torch.arange(count, device=starts.device)
        numbers = self.uniforms[..., purpose]
        # Indices beyond the last number repeat it, but only for positions that are never decided.
        return numbers.gather(1, indices.clamp(max=numbers.shape[1] - 1))

    def advance(self, decided: Tensor, num_accepted: Tensor | None = None) -> None:
        """Append the decided tokens to the rows, in place. Rows that rest gain none.

        For example, a row ends with `a`, the tokens b, c and d were proposed, b was accepted, and y follows it. Then
        `decided` is [b, y, *, *], where * stands for tokens that are ignored, and `num_accepted` is 1. PREVIOUS becomes
        b, LAST becomes y, and LENGTH and DECIDED grow by 2.

        Args:
            decided: [B, 1 + K], the accepted tokens, the token after them, and then tokens that are ignored.
            num_accepted: [B]. None if nothing was proposed; then `decided` is [B, 1].
        """
        gained = running = self.numbers[Column.RUNNING]
        # `tail` becomes the last two tokens of each row, [B, 2]: in the example, b and y of [a, b, y, *, *].
        tail = torch.cat([self.last, decided], 1)
        if num_accepted is not None:
            gained = (num_accepted + 1) * running
            before_last = num_accepted.unsqueeze(1)
            tail = tail.gather(1, torch.cat([before_last, before_last + 1], 1))
        self.numbers[Column.PREVIOUS : Column.LENGTH] = tail.T
        self.numbers[Column.LENGTH : Column.MOST] += gained
        self.numbers[Column.ITERATIONS] += running
        self.numbers[Column.GAINED] = gained
        self.decided[:, : decided.shape[1]] = decided
