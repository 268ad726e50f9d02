"""Drafting with a head of any kind: its cache, the target's features, and its proposals.

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
from harness.local.decoding.warp import AnyWarp, BatchWarp, Warp
from harness.local.drafting.heads.head import Draft, Head, Unread
from harness.local.runners.base import WithoutCudnn
from harness.local.runners.checks import require_close
from harness.local.runners.compiled import CompiledCall, filled_up
from harness.local.runners.slots import SlotCache

_NUM_UNREAD = len(Unread._fields)


@dataclass
class _Row:
    """The features of one row that the head has not read, from a verdict to the next proposal.

    A verdict brings one for each token that it decided: the hidden states of the target at the token
    before it. They wait as views of the target's outputs: while nothing is drafted, a head that does
    not pay must cost nothing.

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
        cache: the head's.
    """

    compiled: CompiledDraft | None = None

    def __init__(self, head: Head, warp: AnyWarp, threshold: float) -> None:
        self.head = head
        self.layers = head.config.layers
        self.device = next(head.parameters()).device
        self.cache = SlotCache()
        self._warp = warp
        self._threshold = threshold
        self._known_tokens: Tensor | None = None
        if head.d2t is not None:
            self._known_tokens = head.d2t + torch.arange(len(head.d2t), device=self.device)

    @property
    def warp(self) -> Warp | None:
        """The warp that all rows of the batch have now; None where they differ."""
        return self._warp.common if isinstance(self._warp, BatchWarp) else self._warp

    def zero_nan(self) -> None:
        self.cache.zero_nan()

    def clear(self) -> None:
        self.cache = SlotCache() if self.compiled is None else self.compiled.cache
        self._rows: list[_Row] = []

    def add(self, prompts: TokenRows, first_tokens: Sequence[int], step: Step) -> None:
        assert step.hidden is not None, "the target's runner captures no hidden states"
        # Where proposals are wanted.
        self._target_device = step.hidden.device
        for states, prompt, first in zip(step.hidden, prompts, first_tokens, strict=True):
            # Padding on a row's left may be no number at all, and must not reach the cache.
            self._rows.append(_Row([states[-len(prompt) :]], [*prompt[1:], first]))
        self._reserve(self.cache.num_slots, len(self._rows))

    @inference
    def propose(self, num_draft_tokens: int, uniforms: Tensor) -> Proposal:
        uniforms = uniforms.to(self.device)
        compiled = self._compiled_for(num_draft_tokens)
        unread = self._unread()
        if compiled is not None:
            draft = compiled(unread, uniforms)
        else:
            num_ahead = self.head.num_ahead(num_draft_tokens)
            self._reserve(self._most_read + unread.features.shape[1] + num_ahead)
            with WithoutCudnn():
                draft = self.head.draft(unread, uniforms, self.cache, self.draw)
        self._count_as_read()
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
        self.cache.select(to_device(rows, self.device), max(rows) + 1)
        self._rows = [self._rows[row] for row in rows]

    def _compiled_for(self, num_draft_tokens: int) -> CompiledDraft | None:
        """Return the compiled proposals, with room in the cache for one; None where this one is drafted eagerly."""
        compiled = self.compiled
        if compiled is None or not compiled.fits(self.warp, num_draft_tokens):
            return None
        # It reads as many features as a verdict can leave; others are read before it.
        if max(len(row.following) for row in self._rows) > compiled.most_unread:
            self._read_early()
        self._reserve(self._most_read + compiled.num_written)
        # None if the batch has just outgrown them.
        return self.compiled

    @property
    def _most_read(self) -> int:
        """The most features of a row that have been read."""
        return max(row.num_read for row in self._rows)

    def _unread(self) -> Unread:
        """Return the features that wait, on the head's device."""
        for row in self._rows:
            row.parts = [torch.cat(row.parts)]
        features = pad_sequence([row.parts[0] for row in self._rows], batch_first=True)
        following = [row.following for row in self._rows]
        return Unread(
            features.flatten(2).to(self.device),
            to_device(padded(following), self.device),
            to_device(list(map(len, following)), self.device),
            to_device([row.num_read for row in self._rows], self.device),
        )

    def _count_as_read(self, num_again: int = 0) -> None:
        """Count as read what `_unread` returned, but the last `num_again` features of each row."""
        for row in self._rows:
            num_new = max(0, len(row.following) - num_again)
            row.num_read += num_new
            row.following = row.following[num_new:]
            row.parts = [states[num_new:] for states in row.parts]

    def _reserve(self, num_slots: int, num_rows: int = 0) -> None:
        """Set the cache's number of slots. A compiled cache keeps its size: a batch that outgrows
        it goes on eagerly in a copy.
        """
        if self.compiled is not None:
            if num_slots <= self.cache.num_slots and num_rows <= self.compiled.batch_size:
                return
            self.cache = self.cache.copied()
            self.compiled = None
        self.cache.num_slots = num_slots

    def _read_early(self) -> None:
        """Read all features now. The last one of each row is read again with those that follow,
        because `draft` needs at least one.
        """
        unread = self._unread()
        self._reserve(self._most_read + unread.features.shape[1])
        with WithoutCudnn():
            self.head.read(unread, self.cache)
        self._count_as_read(num_again=1)

    def draw(self, logits: Tensor, uniforms: Tensor) -> Draft:
        """Draw by logits [B, ..., V of the head] and uniforms [B, ...], or the target's tokens in their place."""
        probabilities = self._warp(logits)
        tokens = existing_index(probabilities, uniforms)
        if self._known_tokens is not None:
            if not are_tokens(uniforms):
                tokens = self._known_tokens[tokens]
            shape = (*probabilities.shape[:-1], self.head.config.vocabulary_size)
            nothing = probabilities.new_zeros(shape)
            probabilities = nothing.index_copy(-1, self._known_tokens, probabilities)
        return Draft(tokens, probabilities)


class CompiledDraft:
    """Whole proposals as compiled calls, one for each K, which all drafters over a head share, one
    after the other. A head that drafts all tokens in one pass needs a call for the largest K alone.

    Fewer rows, features and tokens are filled up. What features that only fill up leave in the cache is
    never seen.

    Args:
        drafter: one for the warp that tokens will be drawn with. It serves to compile, never for a
            batch.
        target: the model that is followed.
        batch_size: the most rows of a batch.
        num_slots: `Demand.slots` of a row.
        numbers: of draft tokens.

    Attributes:
        cache: the keys and values of every drafter's batch, of fixed size.
        most_unread: how many features of each row a proposal reads.
        num_written: how many slots behind those read before it writes at most.
        setup_seconds: how long compiling took.

    Raises UnsupportedModelError if the head cannot be compiled, or then drafts otherwise.
    """

    @inference
    def __init__(
        self,
        drafter: HeadDrafter,
        target: PreTrainedModel,
        batch_size: int,
        num_slots: int,
        draft_lengths: Sequence[int],
    ) -> None:
        started = time.perf_counter()
        head = drafter.head
        self._warp = drafter.warp
        most = max(draft_lengths)
        self.batch_size = batch_size
        self.most_unread = most + 1
        self.num_written = self.most_unread + head.num_ahead(most)
        self.cache = SlotCache()
        self.cache.num_slots = round_up(num_slots + self.num_written)
        config = head.config
        shape = (batch_size, self.most_unread, len(config.layers) * config.target_size)
        features = torch.arange(math.prod(shape), device=drafter.device).view(shape).sin()
        following = torch.zeros(shape[:2], dtype=torch.long, device=drafter.device)
        starts = following[:, 0]
        unread = Unread(features.to(target.dtype), following, starts + self.most_unread, starts)
        self._unread_shapes = [tensor.shape for tensor in unread]

        def propose(*inputs: Tensor) -> list[Tensor]:
            unread = Unread(*inputs[:_NUM_UNREAD])
            draft = head.draft(unread, inputs[_NUM_UNREAD], self.cache, drafter.draw)
            return [tensor for tensor in draft if tensor is not None]

        self._calls: dict[int, CompiledCall] = {}
        for number in [most] if head.one_pass else sorted(draft_lengths):
            uniforms = torch.full((batch_size, number), 0.5, device=drafter.device)
            example = [*unread, uniforms]
            expected = Draft(*propose(*example))
            self._calls[number] = CompiledCall(propose, example, head, self.cache.buffers)
            actual = Draft(*self._calls[number](*example))
            # The first token alone: rounding may draw another one, and after it nothing is equal.
            require_close(
                [actual.probabilities[:, 0]],
                [expected.probabilities[:, 0]],
                target,
                "compiled differ from the eager ones",
            )
        self.setup_seconds = time.perf_counter() - started

    def fits(self, warp: Warp | None, num_draft_tokens: int) -> bool:
        """Whether it was compiled for this warp, and for `num_draft_tokens` or more."""
        return num_draft_tokens <= max(self._calls) and warp == self._warp

    @inference
    def __call__(self, unread: Unread, uniforms: Tensor) -> Draft:
        """Draft at least as many tokens for each row as it has uniforms."""
        number = next(number for number in self._calls if number >= uniforms.shape[1])
        shapes = [*self._unread_shapes, (self.batch_size, number)]
        inputs = zip((*unread, uniforms), shapes, strict=True)
        outputs = self._calls[number](*(filled_up(tensor, *shape) for tensor, shape in inputs))
        return Draft(*(output[: len(uniforms)] for output in outputs))

    def close(self) -> None:
        """Give back memory. The compiled calls refer to this object: without them all is freed at once."""
        self._calls = {}
        self.cache = SlotCache()
