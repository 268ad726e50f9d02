"""The target's features that a head has not read yet, from a verdict to the next proposal.

A verdict brings one feature for each token that it decided, in each row another number: the hidden
states of the target at the token before it. The head reads features and tokens in pairs, when it
next proposes. Until then they wait in chunks, one for each verdict. Say two rows decide `a b c` and
`d`, then `e` and `f g`:

    row 0   a b c | e .
    row 1   d . . | f g        a dot is padding

For a proposal both chunks are merged, and what counts is moved to the left: `a b c e` and `d f g`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from harness.local.decoding.transfer import decided_tokens, to_device


class Unread(NamedTuple):
    """The unread features of a batch, moved to the left: what a proposal reads.

    Attributes:
        features: [B, n, L * D], of which the first `counts` of each row are unread.
        following: [B, n], the token after each.
        counts: [B], at least 1; 0 in rows that only fill up a compiled batch.
        starts: [B], the slots of the first ones in the head's cache.
    """

    features: Tensor
    following: Tensor
    counts: Tensor
    starts: Tensor

    def last(self) -> tuple[Tensor, Tensor]:
        """Return indices of each row's last unread feature: of the rows, and within them."""
        last = (self.counts - 1).clamp(min=0)
        return torch.arange(len(last), device=last.device), last


@dataclass(frozen=True)
class _Chunk:
    """Features [B, n, L * D] and the tokens [B, n] that follow them.

    In row b those from `first[b]` to `first[b] + counts[b]` have not been read.
    """

    features: Tensor
    following: Tensor
    first: Sequence[int]
    counts: Sequence[int]

    def is_unread(self) -> Tensor:
        """Return which of the features [B, n] have not been read."""
        device = self.features.device
        index = torch.arange(self.features.shape[1], device=device)
        first = to_device(self.first, device).unsqueeze(1)
        count = to_device(self.counts, device).unsqueeze(1)
        return (index >= first) & (index < first + count)


class UnreadFeatures:
    """The unread features of each row of a batch.

    Args:
        device: the head's.

    Attributes:
        num_read: how many features of each row have been read, which are its entries in the cache.
        counts: how many have not.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._chunks: list[_Chunk] = []
        # Verdicts that accepted nothing, after those of the chunks: hidden states [B, 1, L, D] and
        # the next tokens.
        self._undrafted: list[tuple[Tensor, Sequence[int]]] = []
        self.num_read: Sequence[int] = []
        self.counts: Sequence[int] = []

    def add(
        self, hidden: Tensor, prompts: Sequence[Sequence[int]], first_tokens: Sequence[int]
    ) -> None:
        """Add rows behind the others, with hidden states [rows, longest, L, D] of their prompts."""
        features: list[Tensor] = []
        following: list[Tensor] = []
        if self.counts:
            before = self._merged()
            features += before.features
            following += before.following
        for states, prompt, first in zip(hidden, prompts, first_tokens, strict=True):
            # Padding on a row's left may be no number at all, and must not reach the cache.
            features.append(states[-len(prompt) :].flatten(1))
            following.append(to_device([*prompt[1:], first], self._device))
        self.num_read = [*self.num_read, *[0] * len(prompts)]
        self.counts = [*self.counts, *map(len, prompts)]
        padded_features = pad_sequence(features, batch_first=True)
        padded_following = pad_sequence(following, batch_first=True)
        self._chunks = [self._left_aligned(padded_features, padded_following)]

    def observe(
        self,
        hidden: Tensor,
        proposed: Tensor,
        num_accepted: Sequence[int],
        next_tokens: Sequence[int],
    ) -> None:
        """Add what a verdict decided: of proposed [B, K] the accepted tokens, and the next one.

        Args:
            hidden: [B, K + 1, L, D], of the token before the proposal and of the proposed ones.
        """
        longest = max(num_accepted)
        counts = [count + 1 for count in num_accepted]
        self.counts = _sums(counts, self.counts)
        if not longest:
            # While nothing is drafted this is all: a head that does not pay must cost nothing.
            self._undrafted.append((hidden[:, :1], next_tokens))
            return
        self._join_undrafted()
        decided = decided_tokens(proposed, num_accepted, next_tokens)
        features = hidden[:, : longest + 1].flatten(2).to(self._device)
        self._chunks.append(_Chunk(features, decided, [0] * len(counts), counts))

    def _join_undrafted(self) -> None:
        """Make a chunk of the verdicts that accepted nothing."""
        if not self._undrafted:
            return
        hidden = torch.cat([states for states, _ in self._undrafted], dim=1)
        features = hidden.flatten(2).to(self._device)
        num_rows, count = features.shape[:2]
        tokens = [token for _, next_tokens in self._undrafted for token in next_tokens]
        following = to_device(tokens, self._device).view(count, num_rows).T
        self._chunks.append(_Chunk(features, following, [0] * num_rows, [count] * num_rows))
        self._undrafted = []

    def select(self, rows: Sequence[int], index: Tensor) -> None:
        """Continue with these rows only, in this order; `index` has them on the device."""
        before = self._merged()
        self.num_read = [self.num_read[row] for row in rows]
        self.counts = [self.counts[row] for row in rows]
        self._chunks = [self._left_aligned(before.features[index], before.following[index])]

    def all(self) -> Unread:
        """Merge all chunks, and return their features."""
        chunk = self._merged()
        self._chunks = [chunk]
        counts = to_device(self.counts, self._device)
        starts = to_device(self.num_read, self._device)
        return Unread(chunk.features, chunk.following, counts, starts)

    def count_as_read(self, num_again: int) -> None:
        """Count as read what `all` returned, but the last `num_again` features of each row."""
        (chunk,) = self._chunks
        again = [0] * len(self.counts)
        if num_again:
            again = [min(num_again, count) for count in self.counts]
        first = _sums(self.counts, [-count for count in again])
        self.num_read = _sums(first, self.num_read)
        self.counts = again
        self._chunks = []
        if num_again:
            self._chunks = [_Chunk(chunk.features, chunk.following, first, again)]

    def _left_aligned(self, features: Tensor, following: Tensor) -> _Chunk:
        """Return the only chunk, in which what counts is on the left."""
        return _Chunk(features, following, [0] * len(features), self.counts)

    def _merged(self) -> _Chunk:
        """Return all chunks as one, in which what counts is on the left."""
        self._join_undrafted()
        chunks = self._chunks
        if len(chunks) == 1 and not any(chunks[0].first):
            return chunks[0]
        features = torch.cat([chunk.features for chunk in chunks], dim=1)
        following = torch.cat([chunk.following for chunk in chunks], dim=1)
        is_unread = torch.cat([chunk.is_unread() for chunk in chunks], dim=1)
        order = is_unread.int().argsort(dim=1, descending=True, stable=True)
        order = order[:, : max(self.counts)]
        rows = torch.arange(len(order), device=order.device).unsqueeze(1)
        return self._left_aligned(features[rows, order], following[rows, order])


def _sums(numbers: Sequence[int], others: Sequence[int]) -> list[int]:
    return [number + other for number, other in zip(numbers, others, strict=True)]
