"""Drafting with a head of any kind. The drafter keeps the target's features and the head's cache between iterations.

Features are the target's hidden states, with the L captured layers side by side. `learn` keeps the features of the
decided tokens. `draft` then passes them to the head's own `draft`, which reads them into the cache and draws up to K
tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from harness.config.amounts import round_up
from harness.local.decoding.protocols import Proposal, Step, TensorDrafter, TokenRows
from harness.local.decoding.randomness import are_tokens, existing_index
from harness.local.decoding.state import Column, RowState
from harness.local.decoding.transfer import padded, to_device
from harness.local.decoding.warp import AnyWarp
from harness.local.drafting.heads.head import Draft, Head, Unread
from harness.local.runners.base import gather_rows
from harness.local.runners.compiled import Part
from harness.local.runners.slots import SlotCache


class HeadSampler:
    """Draws tokens of the target's vocabulary by the logits of a head.

    Args:
        warp: how the logits become probabilities.
    """

    def __init__(self, head: Head, warp: AnyWarp) -> None:
        self._warp = warp
        self._vocabulary_size = head.config.vocabulary_size
        # The target's token for each of the head's tokens; None if the two vocabularies are the same.
        self._target_tokens: Tensor | None = None
        if head.d2t is not None:
            self._target_tokens = head.d2t + torch.arange(len(head.d2t), device=head.d2t.device)

    def __call__(self, logits: Tensor, uniforms: Tensor) -> Draft:
        """Draw with uniforms [B, ...] by logits [B, ..., V of the head]. Whole numbers in place of uniforms are the
        target's tokens of a text that is replayed. They are returned unchanged, with their probabilities.
        """
        probabilities = self._warp(logits)
        tokens = existing_index(probabilities, uniforms)
        if self._target_tokens is not None:
            if not are_tokens(uniforms):
                tokens = self._target_tokens[tokens]
            shape = (*probabilities.shape[:-1], self._vocabulary_size)
            nothing = probabilities.new_zeros(shape)
            probabilities = nothing.index_copy(-1, self._target_tokens, probabilities)
        return Draft(tokens, probabilities)


def draft_tensors(head: Head, cache: SlotCache, draw: HeadSampler, *inputs: Tensor) -> list[Tensor]:
    """Call `head.draft`, with tensors in place of `Unread` and `Draft`, so that `Part` can compile it. Returns the
    fields of the `Draft`.

    Args:
        inputs: the fields of an `Unread`, followed by uniforms [B, K].
    """
    *unread, uniforms = inputs
    return list(head.draft(Unread(*unread), uniforms, cache, draw))


class HeadDrafter(TensorDrafter):
    """A drafter that uses a head.

    If the head has a cache, it has one entry for each decided token but the last, which has no
    features yet.

    Args:
        head: a head that is `ready`.
        warp: how the head's logits become probabilities.
    """

    device: torch.device

    def __init__(self, head: Head, warp: AnyWarp) -> None:
        self.head = head
        self.layers = head.config.layers
        self.warp = warp
        self.device = next(head.parameters()).device
        self._draw = HeadSampler(head, warp)
        self._cache = SlotCache()  # has no room yet

    def make_room(self, num_rows: int, num_draft_tokens: int, num_slots: int) -> None:
        # A proposal also writes slots after the row's own. K is the same for all batches.
        num_slots += self.head.num_written(num_draft_tokens + 1, num_draft_tokens)
        if self._cache.has_room(num_rows, num_slots):
            return
        config = self.head.config
        size = len(config.layers) * config.target_size
        dtype = next(self.head.parameters()).dtype
        # [B, K + 1, L * D], the features at the token before each token of `RowState.decided`.
        self._features = torch.zeros(
            num_rows, num_draft_tokens + 1, size, device=self.device, dtype=dtype
        )
        self._cache = SlotCache(num_rows, round_up(num_slots))
        # The proposal is compiled anew for each kind of warp.
        warp = self.warp
        drafting = functools.partial(draft_tensors, self.head, self._cache, self._draw)
        # Called with the fields of an `Unread`, and uniforms [B, K].
        self._propose = Part(drafting, [self.head], lambda: warp.kind)

    def start(self, prompts: TokenRows, first_tokens: Sequence[int], step: Step) -> None:
        assert step.hidden is not None, "the target's runner captures no hidden states"
        features, cache = self._features, self._cache
        lengths = list(map(len, prompts))
        # In a `Step` the rows are aligned at the right, and the padding before them may be nan, which must not reach
        # the cache. Here they are aligned at the left, and padded with zeros.
        by_row = zip(step.hidden, lengths, strict=True)
        states = pad_sequence([row[-length:] for row, length in by_row], batch_first=True)
        of_prompts = states.flatten(2).to(features)
        last = to_device(lengths, self.device) - 1
        if max(lengths) > 1:
            # The head reads all features but the last, which the first proposal begins with.
            following = padded([prompt[1:] for prompt in prompts], least=max(lengths))
            cache.width = max(lengths)
            starts = torch.zeros_like(last)
            unread = Unread(of_prompts, to_device(following, self.device), last, starts)
            self.head.read(unread, cache)
        features[: len(prompts), 0] = gather_rows(of_prompts, last)

    def draft(self, rows: RowState, uniforms: Tensor) -> Proposal:
        num_rows, num_draft_tokens = uniforms.shape
        width = rows.decided.shape[1]
        cache = self._cache
        # The target has read LENGTH tokens of a row, all but its last. The last GAINED of these have features that the
        # head has not read, so the first unread feature is that of token LENGTH - GAINED.
        counts = rows.numbers[Column.GAINED]
        unread = (
            self._features[:num_rows, :width],
            rows.decided,
            counts,
            rows.numbers[Column.LENGTH] - counts,
        )
        if rows.lengths is None:
            cache.width = cache.num_slots
        else:
            longest = max(length for length in rows.lengths if length is not None)
            # A row gained at least one token, so that its first unread feature goes to slot LENGTH - 1 at most.
            cache.width = longest - 1 + self.head.num_written(width, num_draft_tokens)
        tokens, probabilities = self._propose(*unread, uniforms)
        return Proposal(tokens, probabilities)

    def learn(self, hidden: Tensor) -> None:
        num_rows, width = hidden.shape[:2]
        self._features[:num_rows, :width] = hidden.flatten(2)
