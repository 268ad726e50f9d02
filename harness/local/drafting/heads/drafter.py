"""Drafts with a head of any kind. The drafter keeps the target's features and the head's cache between iterations.

The *features* of a token are the target's hidden states at this token, from the L layers that the head reads, joined to
one vector. `learn` keeps the features of the decided tokens. `draft` then passes them to the head's own `draft`, which
reads them into the cache and draws up to K tokens.
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
    """Draws tokens of the target's vocabulary according to a head's logits.

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
        """Draw tokens according to logits [B, ..., V of the head], with uniform random numbers [B, ...].

        While a text is replayed, `uniforms` contains whole numbers: the text's tokens, as ids of the target's
        vocabulary. They are returned unchanged, together with the distributions that they would be drawn from.
        """
        probabilities = self._warp(logits)
        tokens = existing_index(probabilities, uniforms)
        if self._target_tokens is not None:
            if not are_tokens(uniforms):
                tokens = self._target_tokens[tokens]
            shape = (*probabilities.shape[:-1], self._vocabulary_size)
            # If the head's tokens 0, 1, 2 are the target's 0, 1, 5, the probabilities a, b, c become a, b, 0, 0, 0, c.
            nothing = probabilities.new_zeros(shape)
            probabilities = nothing.index_copy(-1, self._target_tokens, probabilities)
        return Draft(tokens, probabilities)


def draft_tensors(head: Head, cache: SlotCache, draw: HeadSampler, *inputs: Tensor) -> list[Tensor]:
    """Call `head.draft`. Arguments and results are plain tensors, not `Unread` and `Draft`, so that `Part` can compile
    this function. Returns the fields of the `Draft`.

    Args:
        inputs: the fields of an `Unread`, followed by uniforms [B, K].
    """
    *unread, uniforms = inputs
    return list(head.draft(Unread(*unread), uniforms, cache, draw))


class HeadDrafter(TensorDrafter):
    """A drafter that uses a head.

    After `draft` has read the features, the head's cache (if it has one) contains one entry for each token of the
    text but the last. The last token has no features yet, because the target has not read it.

    Args:
        head: a head that `checkpoint.ready` has prepared for drafting.
        warp: how the head's logits become probabilities.
    """

    device: torch.device

    def __init__(self, head: Head, warp: AnyWarp) -> None:
        self.head = head
        self.layers = head.config.target_layers
        self.warp = warp
        self.device = next(head.parameters()).device
        self._draw = HeadSampler(head, warp)
        # An empty cache, which `make_room` replaces.
        self._cache = SlotCache()

    def make_room(self, num_rows: int, num_draft_tokens: int, num_slots: int) -> None:
        # A proposal reads at most K + 1 features, and also writes slots after those of the decided tokens. A drafter
        # belongs to one `Calls`, whose K is fixed, so that the buffer of features, which depends on K, needs no check.
        num_slots += self.head.num_written(num_draft_tokens + 1, num_draft_tokens)
        if self._cache.has_room(num_rows, num_slots):
            return
        config = self.head.config
        size = len(config.target_layers) * config.target_size
        dtype = next(self.head.parameters()).dtype
        # [B, K + 1, L * D]: entry i has the features of the token before `RowState.decided[:, i]`.
        self._features = torch.zeros(
            num_rows, num_draft_tokens + 1, size, device=self.device, dtype=dtype
        )
        self._cache = SlotCache(num_rows, round_up(num_slots))
        # The proposal is compiled again for each kind of warp. This is a local name, because with `self.warp`, drafter
        # and part would refer to each other, and only the garbage collector would free them.
        warp = self.warp
        drafting = functools.partial(draft_tensors, self.head, self._cache, self._draw)
        # The arguments are the fields of an `Unread`, followed by uniforms [B, K].
        self._propose = Part(drafting, [self.head], lambda: warp.kind)

    def start(self, prompts: TokenRows, first_tokens: Sequence[int], step: Step) -> None:
        assert step.hidden is not None, "the target's runner captures no hidden states"
        features, cache = self._features, self._cache
        lengths = list(map(len, prompts))
        # In a `Step` the rows are aligned at the right, and the padding to their left may be nan, which must not reach
        # the cache. So the rows are aligned at the left here, and padded with zeros.
        by_row = zip(step.hidden, lengths, strict=True)
        states = pad_sequence([row[-length:] for row, length in by_row], batch_first=True)
        of_prompts = states.flatten(2).to(features)
        last = to_device(lengths, self.device) - 1
        if max(lengths) > 1:
            # The head reads all features of each prompt but its last. The first proposal begins by reading the last.
            following = padded([prompt[1:] for prompt in prompts], least=max(lengths))
            cache.width = max(lengths)
            starts = torch.zeros_like(last)
            # `last` is the index of a prompt's last token, and so the number of features before it.
            unread = Unread(
                of_prompts, to_device(following, self.device), counts=last, starts=starts
            )
            self.head.read(unread, cache)
        features[: len(prompts), 0] = gather_rows(of_prompts, last)

    def draft(self, rows: RowState, uniforms: Tensor) -> Proposal:
        num_rows, num_draft_tokens = uniforms.shape
        width = rows.decided.shape[1]
        cache = self._cache
        # The target has read LENGTH tokens of a row: all but its last token. The head has not read the features of the
        # last GAINED of these tokens. So the first unread features are those of the token with index LENGTH - GAINED.
        counts = rows.numbers[Column.GAINED]
        unread = (
            self._features[:num_rows, :width],
            rows.decided,
            counts,
            rows.numbers[Column.LENGTH] - counts,
        )
        # A prepared call knows no lengths on the host, so it reads all slots.
        if rows.lengths is None:
            cache.width = cache.num_slots
        else:
            longest = max(length for length in rows.lengths if length is not None)
            # Each row gained at least one token, so that its first unread features belong at slot LENGTH - 1 or before.
            # Rows that rest may write behind `width`, which nobody reads.
            cache.width = longest - 1 + self.head.num_written(width, num_draft_tokens)
        return Proposal(*self._propose(*unread, uniforms))

    def learn(self, hidden: Tensor) -> None:
        # hidden[:, i] belongs to the token before `decided[:, i]`.
        num_rows, width = hidden.shape[:2]
        # Copied by `to`, because `runners.prepared.Graphs` puts no other copy between two GPUs' graphs.
        self._features[:num_rows, :width] = hidden.flatten(2).to(self.device)
