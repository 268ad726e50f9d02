"""Drafting with a head of any kind: the target's features, the head's cache, and its proposals.

`learn` keeps the features, the target's own hidden states, of the decided tokens. `draft` then hands them to the
head's, which reads them into the cache and draws K tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from harness.config.amounts import round_up
from harness.local.decoding.iteration import with_room
from harness.local.decoding.protocols import Proposal, Step, TensorDrafter, TokenRows
from harness.local.decoding.randomness import are_tokens, existing_index
from harness.local.decoding.state import Column, RowState
from harness.local.decoding.transfer import padded, to_device
from harness.local.decoding.warp import AnyWarp
from harness.local.drafting.heads.head import Draft, Head, Unread
from harness.local.runners.base import WithoutCudnn, gather_rows
from harness.local.runners.compiled import Part
from harness.local.runners.slots import SlotCache


class HeadSampler:
    """Draws the target's tokens by the logits of a head.

    Args:
        warp: the one for the target's logits.
    """

    def __init__(self, head: Head, warp: AnyWarp) -> None:
        self._warp = warp
        self._vocabulary_size = head.config.vocabulary_size
        # The target's token for each of the head's; None where they are the same.
        self._target_tokens: Tensor | None = None
        if head.d2t is not None:
            self._target_tokens = head.d2t + torch.arange(len(head.d2t), device=head.d2t.device)

    def __call__(self, logits: Tensor, uniforms: Tensor) -> Draft:
        """Draw by logits [B, ..., V of the head] and uniforms [B, ...], or the target's tokens in their place."""
        probabilities = self._warp(logits)
        tokens = existing_index(probabilities, uniforms)
        if self._target_tokens is not None:
            if not are_tokens(uniforms):
                tokens = self._target_tokens[tokens]
            shape = (*probabilities.shape[:-1], self._vocabulary_size)
            nothing = probabilities.new_zeros(shape)
            probabilities = nothing.index_copy(-1, self._target_tokens, probabilities)
        return Draft(tokens, probabilities)


def propose(head: Head, cache: SlotCache, draw: HeadSampler, *inputs: Tensor) -> list[Tensor]:
    """Draft with a head -> the tensors of its `Draft`.

    Args:
        inputs: the fields of an `Unread`, and uniforms [B, K].
    """
    *unread, uniforms = inputs
    return list(head.draft(Unread(*unread), uniforms, cache, draw))


class HeadDrafter(TensorDrafter):
    """A drafter over a head.

    A head with a cache has an entry there for each decided token but the last, which has no
    features yet. The head may be on another device than the target's tokens.

    Args:
        head: with the matrices that it borrows.
        warp: the one for the target's logits.

    Attributes:
        cache: the batch's.
    """

    device: torch.device

    def __init__(self, head: Head, warp: AnyWarp) -> None:
        self.head = head
        self.layers = head.config.layers
        self.warp = warp
        self.cache = SlotCache()
        self.device = next(head.parameters()).device
        self._draw = HeadSampler(head, warp)
        self._num_rows = 0
        size = len(head.config.layers) * head.config.target_size
        parameter = next(head.parameters())
        # [B, n, L * D], of the token before each of `RowState.decided`.
        self._features = torch.zeros(0, 1, size, device=self.device, dtype=parameter.dtype)
        self._prepared = (self._features, self.cache)
        self._propose_fixed: Callable[..., list[Tensor]] = self._proposer(self.cache)

    def prepare(
        self, num_rows: int, num_draft_tokens: int, num_slots: int, device: torch.device
    ) -> None:
        width = num_draft_tokens + 1
        self._features = with_room(self._features, num_rows, width)
        self.cache = SlotCache()
        self.cache.num_slots = round_up(num_slots + self.head.num_written(width, num_draft_tokens))
        self._prepared = (self._features, self.cache)
        warp = self.warp
        self._propose_fixed = Part(self._proposer(self.cache), [self.head], lambda: warp.kind)

    def clear(self) -> None:
        self._features, self.cache = self._prepared
        self._num_rows = 0

    def add(self, prompts: TokenRows, first_tokens: Sequence[int], step: Step) -> None:
        assert step.hidden is not None, "the target's runner captures no hidden states"
        first = self._num_rows
        self._num_rows += len(prompts)
        self._features = with_room(self._features, self._num_rows)
        lengths = list(map(len, prompts))
        # Padding on a row's left may be no number at all, and must not reach the cache.
        rows = zip(step.hidden, lengths, strict=True)
        states = pad_sequence([row[-length:] for row, length in rows], batch_first=True)
        features = states.flatten(2).to(self._features)
        last = to_device(lengths, self.device) - 1
        if max(lengths) > 1:
            # All but the last, with which the first proposal begins.
            following = padded([prompt[1:] for prompt in prompts], least=max(lengths))
            self._reserve(max(lengths))
            self.cache.first_row = first
            with WithoutCudnn():
                starts = torch.zeros_like(last)
                unread = Unread(features, to_device(following, self.device), last, starts)
                self.head.read(unread, self.cache)
            self.cache.first_row = 0
        self._features[first : self._num_rows, 0] = gather_rows(features, last)

    def draft(self, rows: RowState, uniforms: Tensor) -> Proposal:
        num_rows, num_draft_tokens = uniforms.shape
        width = rows.decided.shape[1]
        counts = rows.numbers[Column.GAINED]
        unread = (
            self._features[:num_rows, :width],
            rows.decided,
            counts,
            rows.numbers[Column.LENGTH] - counts,
        )
        proposer = self._propose_fixed
        if not rows.is_fixed:
            # The last unread feature is of the last token that the target has read.
            self._reserve(rows.longest - 1 + self.head.num_written(width, num_draft_tokens))
            proposer = self._proposer(self.cache)
        with WithoutCudnn():
            tokens, probabilities = proposer(*unread, uniforms)
        return Proposal(tokens, probabilities)

    def _proposer(self, cache: SlotCache) -> Callable[..., list[Tensor]]:
        """Return a function that drafts by the fields of an `Unread` and uniforms [B, K], over this cache."""
        return functools.partial(propose, self.head, cache, self._draw)

    def learn(self, hidden: Tensor) -> None:
        num_rows, width = hidden.shape[:2]
        self._features = with_room(self._features, num_rows, width)
        self._features[:num_rows, :width] = hidden.flatten(2)

    def select(self, rows: Sequence[int]) -> None:
        index = to_device(rows, self.device)
        self.cache.select(index, self._num_rows)
        self._features[: len(rows)] = self._features[index]
        self._num_rows = len(rows)

    def _reserve(self, num_slots: int) -> None:
        """Make room in the cache for so many entries of each row. The prepared one keeps its size: a batch that
        outgrows it goes on in a copy.
        """
        features, prepared = self._prepared
        if self.cache is prepared:
            if num_slots <= prepared.num_slots and self._num_rows <= len(features):
                return
            self.cache = prepared.copied()
        self.cache.num_slots = num_slots
