"""Drafting with a head of any kind: the target's features, the head's cache, and its proposals.

`observe` keeps the features, the target's own hidden states, of the decided tokens. `propose` then
hands them to the head's `draft`, which reads them into the cache and draws K tokens. `draft` is a
function of tensors, so that it can be compiled (`CompiledDraft`); what fits no compiled proposal runs
eagerly.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from harness.config.amounts import round_up
from harness.local.decoding.inference import inference
from harness.local.decoding.protocols import Drafter, Proposal, Step, TokenRows
from harness.local.decoding.randomness import are_tokens, existing_index
from harness.local.decoding.transfer import padded, to_device
from harness.local.decoding.warp import AnyWarp, BatchWarp
from harness.local.drafting.heads.head import Draft, Head, Unread
from harness.local.runners.base import WithoutCudnn
from harness.local.runners.checks import require_close
from harness.local.runners.compiled import CompiledCall, filled_up
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


@dataclass
class _Row:
    """The features of one row that the head has not read, from a verdict to the next proposal.

    A verdict brings one for each token that it decided: the hidden states of the target at the token
    before it. They are views of the target's outputs until a proposal needs them, so that a head costs
    nothing while nothing is drafted.

    Attributes:
        parts: [n, L, D] each, in order.
        following: the token after each feature.
        num_read: how many features have been read before, which are its entries in the cache.
    """

    parts: list[Tensor]
    following: list[int]
    num_read: int = 0


class HeadDrafter(Drafter):
    """A drafter over a head.

    A head with a cache has an entry there for each decided token but the last, which has no
    features yet. The head may be on another device than the target's tokens.

    Args:
        head: with the matrices that it borrows.
        warp: the one for the target's logits.
        threshold: offer tokens only as far as a confidence head (DSpark) expects each to be
            accepted with at least this probability; 0 offers all.

    Attributes:
        compiled: drafts where it can; None where nothing is compiled.
        cache: the batch's: that of `compiled` as long as the batch fits into it.
    """

    compiled: CompiledDraft | None = None

    def __init__(self, head: Head, warp: AnyWarp, threshold: float) -> None:
        self.head = head
        self.layers = head.config.layers
        self.warp = warp
        self.cache = SlotCache()
        self._device = next(head.parameters()).device
        self._draw = HeadSampler(head, warp)
        self._threshold = threshold
        self._rows: list[_Row] = []

    def zero_nan(self) -> None:
        self.cache.zero_nan()

    def clear(self) -> None:
        self.cache = SlotCache() if self.compiled is None else self.compiled.cache
        self._rows = []

    def add(self, prompts: TokenRows, first_tokens: Sequence[int], step: Step) -> None:
        assert step.hidden is not None, "the target's runner captures no hidden states"
        # Where proposals are wanted.
        self._target_device = step.hidden.device
        for states, prompt, first in zip(step.hidden, prompts, first_tokens, strict=True):
            # Padding on a row's left may be no number at all, and must not reach the cache.
            self._rows.append(_Row([states[-len(prompt) :]], [*prompt[1:], first]))
        self._reserve(0)

    @inference
    def propose(self, num_draft_tokens: int, uniforms: Tensor) -> Proposal:
        uniforms = uniforms.to(self._device)
        num_unread = max(len(row.following) for row in self._rows)
        compiled = self.compiled
        if compiled is not None and compiled.fits(self.warp, num_draft_tokens):
            if num_unread > compiled.most_unread:
                # Those of a prompt, or of iterations without a draft. `draft` needs the last one.
                self._reserve(num_unread)
                with WithoutCudnn():
                    self.head.read(self._take_unread(num_again=1), self.cache)
            self._reserve(compiled.num_written)
        else:
            compiled = None
            self._reserve(self.head.num_written(num_unread, num_draft_tokens))
        unread = self._take_unread()
        if compiled is not None and self.cache is compiled.cache:
            draft = compiled(unread, uniforms)
        else:
            with WithoutCudnn():
                draft = self.head.draft(unread, uniforms, self.cache, self._draw)
        # A compiled proposal may have more tokens.
        tokens = draft.tokens[:, :num_draft_tokens]
        probabilities = draft.probabilities[:, :num_draft_tokens]
        lengths = None
        if draft.chances is not None and self._threshold:
            are_likely = draft.chances[:, :num_draft_tokens] >= self._threshold
            lengths = are_likely.long().cumprod(-1).sum(-1).tolist()
        device = self._target_device
        return Proposal(tokens.to(device), probabilities.to(device), lengths)

    @inference
    def observe(self, num_accepted: Sequence[int], decided: TokenRows, step: Step) -> None:
        assert step.hidden is not None
        for row, states, tokens in zip(self._rows, step.hidden.unbind(), decided, strict=True):
            row.parts.append(states[: len(tokens)])
            row.following += tokens

    @inference
    def select(self, rows: Sequence[int]) -> None:
        self.cache.select(to_device(rows, self._device), max(rows) + 1)
        self._rows = [self._rows[row] for row in rows]

    def _take_unread(self, num_again: int = 0) -> Unread:
        """Return the features that wait, on the head's device, and count them as read, but the last
        `num_again` of each row.
        """
        for row in self._rows:
            row.parts = [torch.cat(row.parts)]
        features = pad_sequence([row.parts[0] for row in self._rows], batch_first=True)
        following = [row.following for row in self._rows]
        unread = Unread(
            features.flatten(2).to(self._device),
            to_device(padded(following), self._device),
            to_device(list(map(len, following)), self._device),
            to_device([row.num_read for row in self._rows], self._device),
        )
        for row in self._rows:
            num_new = max(0, len(row.following) - num_again)
            row.num_read += num_new
            row.following = row.following[num_new:]
            row.parts = [row.parts[0][num_new:]]
        return unread

    def _reserve(self, num_ahead: int) -> None:
        """Make room in the cache for entries behind those that were read. The compiled one keeps its
        size: a batch that outgrows it goes on in a copy.
        """
        num_slots = num_ahead + max(row.num_read for row in self._rows)
        compiled = self.compiled
        if compiled is not None and self.cache is compiled.cache:
            if num_slots <= self.cache.num_slots and len(self._rows) <= compiled.batch_size:
                return
            self.cache = self.cache.copied()
        self.cache.num_slots = num_slots


class CompiledDraft:
    """Whole proposals as compiled calls, one for each K, which all drafters over a head share, one
    after the other. A head that drafts all tokens in one pass needs a call for the largest K alone.

    Fewer rows, features and tokens are filled up. What features that only fill up leave in the cache is
    never seen.

    Args:
        warp: the one for the target's logits.
        target: the model that is followed.
        batch_size: the most rows of a batch.
        num_slots: `Demand.slots` of a row.
        num_draft_tokens: the largest K that will be asked for.

    Attributes:
        cache: the keys and values of every drafter's batch, of fixed size.
        most_unread: how many features of each row a proposal reads.
        num_written: how many slots behind those read before a proposal writes at most.
        setup_seconds: how long compiling took.

    Raises UnsupportedModelError if the head cannot be compiled, or then drafts otherwise.
    """

    @inference
    def __init__(
        self,
        head: Head,
        warp: AnyWarp,
        target: PreTrainedModel,
        batch_size: int,
        num_slots: int,
        num_draft_tokens: int,
    ) -> None:
        started = time.perf_counter()
        device = next(head.parameters()).device
        draw = HeadSampler(head, warp)
        self._most = num_draft_tokens
        self._warp = warp
        self.batch_size = batch_size
        # A verdict leaves no more features.
        self.most_unread = num_draft_tokens + 1
        self.num_written = head.num_written(self.most_unread, num_draft_tokens)
        self.cache = SlotCache()
        self.cache.num_slots = round_up(num_slots + self.num_written)
        config = head.config
        shape = (batch_size, self.most_unread, len(config.layers) * config.target_size)
        features = torch.arange(math.prod(shape), device=device).view(shape).sin()
        following = torch.zeros(shape[:2], dtype=torch.long, device=device)
        starts = following[:, 0]
        unread = Unread(features.to(target.dtype), following, starts + self.most_unread, starts)

        def propose(*inputs: Tensor) -> list[Tensor]:
            *unread, uniforms = inputs
            draft = head.draft(Unread(*unread), uniforms, self.cache, draw)
            return [tensor for tensor in draft if tensor is not None]

        example = [*unread, torch.full((batch_size, num_draft_tokens), 0.5, device=device)]
        expected = Draft(*propose(*example))
        self._call: CompiledCall | None = CompiledCall(propose, example, head, self.cache.buffers)
        actual = Draft(*self._call(*example))
        # The first token alone: rounding may draw another one, and after it nothing is equal.
        require_close(
            [actual.probabilities[:, 0]],
            [expected.probabilities[:, 0]],
            target,
            "compiled differ from the eager ones",
        )
        self.setup_seconds = time.perf_counter() - started

    def fits(self, warp: AnyWarp, num_draft_tokens: int) -> bool:
        """Whether it was compiled for this warp, and for `num_draft_tokens` or more."""
        common = warp.common if isinstance(warp, BatchWarp) else warp
        return num_draft_tokens <= self._most and common == self._warp

    @inference
    def __call__(self, unread: Unread, uniforms: Tensor) -> Draft:
        """Draft at least as many tokens for each row as it has uniforms."""
        assert self._call is not None
        inputs = [filled_up(tensor, self.batch_size, self.most_unread) for tensor in unread]
        inputs.append(filled_up(uniforms, self.batch_size, self._most))
        outputs = self._call(*inputs)
        return Draft(*(output[: len(uniforms)] for output in outputs))

    def close(self) -> None:
        """Give back memory. The compiled call refers to this object: without it all is freed at once."""
        self._call = None
        self.cache = SlotCache()
