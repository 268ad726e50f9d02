"""Drafting with a head: what the drafters of all kinds of heads have in common.

A head continues from features, the target's own hidden states. `observe` keeps those of the decided
tokens (`unread`). `propose` then hands them to the kind's `draft`, which reads them into the head's
cache and draws K tokens. `draft` is a function of tensors, so that it can be compiled (`CompiledDraft`);
what fits no compiled proposal runs eagerly.
"""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from harness.config.amounts import round_up
from harness.local.decoding.protocols import Drafter, Proposal, Step
from harness.local.decoding.randomness import existing_index
from harness.local.decoding.transfer import to_device
from harness.local.decoding.warp import AnyWarp, current_warp
from harness.local.drafting.heads.slot_cache import SlotCache
from harness.local.drafting.heads.unread import Unread, UnreadFeatures
from harness.local.runners.attention import without_cudnn
from harness.local.runners.checks import require_close
from harness.local.runners.compiled import CompiledCall
from harness.local.runners.sizes import filled_up

# Unread features accumulate until the next proposal; above this many they are processed early to
# bound memory.
MOST_UNREAD = 64
_NUM_UNREAD = len(Unread._fields)


class Draft(NamedTuple):
    """Tokens drawn by a head.

    Attributes:
        tokens: [B, K], the target's.
        probabilities: [B, K, V], the distributions that they were drawn from.
        logits: [B, K, V of the head], what `probabilities` were made of. A head with a smaller
            vocabulary has fewer of them than the target has tokens.
        lengths: [B], how many of the tokens are offered; None for all.
    """

    tokens: Tensor
    probabilities: Tensor
    logits: Tensor
    lengths: Tensor | None = None


class HeadDrafter(Drafter):
    """A drafter over a head; each kind adds `draft`.

    A head with a cache has an entry there for each decided token but the last, which has no
    features yet. The head may be on another device than the target's tokens.

    Args:
        head: a `blocks.Head`.
        target: lends its embedding and its output matrix to a head without them.
        warp: the one applied to the target's logits.
        confidence: offer tokens only as far as a confidence head (DSpark) expects each to be
            accepted with at least this probability; 0 offers all.

    Attributes:
        num_reread: how many of the last features of each row are read again with the next ones.
        vocabulary_size: the width of the target's logits.
        compiled: drafts in place of `draft` where it can; None where nothing is compiled.
        cache: the head's.
    """

    num_reread = 0
    compiled: CompiledDraft | None = None

    def __init__(
        self,
        head: Any,
        target: PreTrainedModel,
        warp: AnyWarp,
        confidence: float = 0.0,
    ) -> None:
        self.head = head
        self.device = next(head.parameters()).device
        self._warp = warp
        self._confidence = confidence
        self.layers = head.config.layers
        self.vocabulary_size = head.config.vocabulary_size
        self._embedding: Any = head.embed_tokens or target.get_input_embeddings()
        self._output: Any = head.lm_head or target.get_output_embeddings()
        self._known_tokens: Tensor | None = head.known_tokens
        self.cache = SlotCache()

    @property
    def warp(self) -> AnyWarp:
        """The warp of the batch as it is now."""
        return current_warp(self._warp)

    @abstractmethod
    def draft(self, unread: Unread, uniforms: Tensor) -> Draft:
        """Read the features, and draft up to K tokens with uniforms [B, K], on the head's device.

        It never waits for the device, and changes nothing but the entries of `cache`. Its first
        `cache.num_slots` slots are those that it may write and see.
        """

    def read(self, unread: Unread) -> Any:
        """Read the features into the cache; a head without one has nothing to do."""

    def num_ahead(self, num_draft_tokens: int) -> int:
        """Return how many slots behind the unread features a proposal may write."""
        return num_draft_tokens

    def start(
        self, prompts: Sequence[Sequence[int]], first_tokens: Sequence[int], step: Step
    ) -> None:
        self.vocabulary_size = step.logits.shape[-1]
        self.cache = SlotCache() if self.compiled is None else self.compiled.cache
        self._unread = UnreadFeatures(self.device)
        self.add(prompts, first_tokens, step)

    def add(
        self, prompts: Sequence[Sequence[int]], first_tokens: Sequence[int], step: Step
    ) -> None:
        assert step.hidden is not None, "the target's runner captures no hidden states"
        # Where proposals are wanted.
        self._target_device = step.hidden.device
        self._unread.add(step.hidden.to(self.device), prompts, first_tokens)
        num_rows = len(self._unread.counts)
        if self.compiled is not None and num_rows > self.compiled.batch_size:
            self._leave_compiled()
        self.cache.ensure_rows(num_rows)
        self._propose_nothing()

    def _propose_nothing(self) -> None:
        """Forget the last proposal: a verdict that follows is over no draft tokens."""
        num_rows = len(self._unread.counts)
        self._proposed = torch.empty(num_rows, 0, dtype=torch.long, device=self.device)

    @torch.inference_mode()
    def propose(self, num_draft_tokens: int, uniforms: Tensor) -> Proposal:
        drafted = self._drafted(num_draft_tokens, uniforms.to(self.device))
        # A compiled proposal may have more tokens, and offer more.
        tokens = drafted.tokens[:, :num_draft_tokens]
        probabilities = drafted.probabilities[:, :num_draft_tokens]
        lengths = None
        if drafted.lengths is not None:
            lengths = drafted.lengths.clamp(max=num_draft_tokens).tolist()
        self._proposed = tokens
        return Proposal(
            tokens.to(self._target_device), probabilities.to(self._target_device), lengths
        )

    def _drafted(self, number: int, uniforms: Tensor) -> Draft:
        """Read what is unread, and draft at least `number` tokens, or as many as the head can."""
        compiled = self.compiled
        if compiled is not None and self.cache is compiled.cache:
            # It reads as many features as a verdict can leave; others are read before it.
            if max(self._unread.counts) > compiled.most_unread:
                self._read_early()
            num_ahead = self.num_ahead(compiled.num_draft_tokens)
            needed = max(self._unread.num_read) + compiled.most_unread + num_ahead
            if needed > self.cache.num_slots:
                self._leave_compiled()
            fits = number <= compiled.num_draft_tokens and compiled.warp == self.warp
            if fits and self.cache is compiled.cache:
                draft = compiled(self._unread.all(), uniforms)
                self._unread.count_as_read(self.num_reread)
                return draft
        unread = self._unread.all()
        self._see(max(self._unread.num_read) + unread.features.shape[1] + self.num_ahead(number))
        with without_cudnn():
            draft = self.draft(unread, uniforms)
        self._unread.count_as_read(self.num_reread)
        return draft

    def _see(self, num_slots: int) -> None:
        """Make the cache show at least this many slots; a compiled one always shows all."""
        if self.compiled is None or self.cache is not self.compiled.cache:
            self.cache.num_slots = num_slots
        elif num_slots > self.cache.num_slots:
            self._leave_compiled()
            self.cache.num_slots = num_slots

    def _leave_compiled(self) -> None:
        """Go on eagerly in a cache of its own: rows or texts have outgrown the compiled one."""
        assert self.compiled is not None
        if self.cache is self.compiled.cache:
            self.cache = self.cache.copied()

    @torch.inference_mode()
    def observe(self, num_accepted: Sequence[int], next_tokens: Sequence[int], step: Step) -> None:
        if max(self._unread.counts) > MOST_UNREAD:
            self._read_early()
        assert step.hidden is not None
        self._unread.observe(step.hidden, self._proposed, num_accepted, next_tokens)
        # A view, which launches nothing on a GPU: iterations that draft nothing should cost nothing.
        self._proposed = self._proposed[:, :0]

    @torch.inference_mode()
    def select(self, rows: Sequence[int]) -> None:
        index = to_device(rows, self.device)
        self.cache.select(index)
        self._unread.select(rows, index)
        self._propose_nothing()

    def _read_early(self) -> None:
        """Read all features now. The last one of each row is read again with those that follow,
        because `draft` needs at least one.
        """
        unread = self._unread.all()
        self._see(max(self._unread.num_read) + unread.features.shape[1])
        with without_cudnn():
            self.read(unread)
        self._unread.count_as_read(max(1, self.num_reread))

    def embed(self, tokens: Tensor) -> Tensor:
        """Embed tokens, by the head's matrix or the target's."""
        return _call_elsewhere(self._embedding, tokens)

    def _logits(self, states: Tensor) -> Tensor:
        """Turn states [..., D], after the final norm, into logits [..., V of the head]."""
        logits = _call_elsewhere(self._output, states)
        # Outputs beyond the vocabulary only pad the target's matrix.
        return logits if self._known_tokens is not None else logits[..., : self.vocabulary_size]

    def draw(self, logits: Tensor, uniforms: Tensor) -> Draft:
        """Draw by logits [B, ..., V of the head] and uniforms [B, ...]. Whole numbers in place of
        uniforms are the target's tokens to take.
        """
        probabilities = self._warp(logits)
        if uniforms.is_floating_point():
            drawn = existing_index(probabilities, uniforms)
            tokens = drawn if self._known_tokens is None else self._known_tokens[drawn]
        else:
            tokens = uniforms
        return Draft(tokens, self.over_vocabulary(probabilities, 0.0), logits)

    def over_vocabulary(self, numbers: Tensor, of_others: float) -> Tensor:
        """Spread numbers [..., V of the head] over the target's tokens [..., V]; tokens that the
        head does not know get the number `of_others`.
        """
        if self._known_tokens is None:
            return numbers
        shape = (*numbers.shape[:-1], self.vocabulary_size)
        return numbers.new_full(shape, of_others).index_copy(-1, self._known_tokens, numbers)


class CompiledDraft:
    """A whole proposal of K tokens as one compiled call, which all drafters over a head share, one
    after the other.

    Fewer rows and features are filled up. What features that only fill up leave in the cache is
    never seen.

    Args:
        drafter: one for the warp that tokens will be drawn with. It serves to compile, never for a
            batch.
        target: the model that is followed.
        vocabulary_size: the width of its logits.
        batch_size: the most rows of a batch.
        num_slots: the most tokens of a row, draft tokens beyond its end included.
        num_draft_tokens: K.

    Attributes:
        cache: the keys and values of every drafter's batch, of fixed size.
        setup_seconds: how long compiling took.

    Raises UnsupportedModelError if the head cannot be compiled, or then drafts otherwise.
    """

    @torch.inference_mode()
    def __init__(
        self,
        drafter: HeadDrafter,
        target: PreTrainedModel,
        vocabulary_size: int,
        batch_size: int,
        num_slots: int,
        num_draft_tokens: int,
    ) -> None:
        started = time.perf_counter()
        drafter.vocabulary_size = vocabulary_size
        self.warp = drafter.warp
        self.num_draft_tokens = num_draft_tokens
        self.batch_size = batch_size
        self.most_unread = drafter.num_reread + num_draft_tokens + 1
        self.cache = drafter.cache
        num_ahead = drafter.num_ahead(num_draft_tokens)
        self.cache.num_slots = round_up(num_slots + self.most_unread + num_ahead)
        example = self._example(drafter, target.dtype)
        self._shapes = [tensor.shape for tensor in example]

        def propose(*inputs: Tensor) -> list[Tensor]:
            draft = drafter.draft(Unread(*inputs[:_NUM_UNREAD]), inputs[_NUM_UNREAD])
            return [tensor for tensor in draft if tensor is not None]

        expected = Draft(*propose(*example))
        call = CompiledCall(propose, example, drafter.head)
        self._call: CompiledCall | None = call
        actual = Draft(*call(*example))
        # The first token alone: rounding may draw another one, and after it nothing is equal.
        require_close(
            [actual.probabilities[:, 0]],
            [expected.probabilities[:, 0]],
            target,
            "compiled differ from the eager ones",
        )
        self.cache.clear()
        self.setup_seconds = time.perf_counter() - started

    @torch.inference_mode()
    def __call__(self, unread: Unread, uniforms: Tensor) -> Draft:
        """Draft K tokens for each row, by uniforms for the first of them at least."""
        assert self._call is not None
        num_rows = len(unread.counts)
        inputs = [
            filled_up(tensor, *shape)
            for tensor, shape in zip((*unread, uniforms), self._shapes, strict=True)
        ]
        return Draft(*(output[:num_rows] for output in self._call(*inputs)))

    def close(self) -> None:
        """Give back memory. The compiled call refers to this object: without it both are freed at once."""
        self._call = None
        self.cache = SlotCache()

    def _example(self, drafter: HeadDrafter, dtype: torch.dtype) -> Sequence[Tensor]:
        """Return inputs of a proposal: those of `Unread`, then uniforms."""
        size, width = self.batch_size, self.most_unread
        device = drafter.device
        config = drafter.head.config
        shape = (size, width, len(config.layers) * config.target_size)
        features = torch.arange(math.prod(shape)).view(shape).sin()
        counts = torch.full((size,), width, device=device)
        return [
            features.to(device, dtype),
            torch.arange(size * width, device=device).view(size, width) % 16,
            counts,
            torch.zeros_like(counts),
            torch.full((size, self.num_draft_tokens), 0.5, device=device),
        ]


def _call_elsewhere(module: Any, inputs: Tensor) -> Tensor:
    """Apply a matrix that may be on another device, and bring the outputs back."""
    place = module.weight.device
    # An offloaded matrix is on the meta device, and its own hook brings it in.
    outputs = module(inputs if place.type == "meta" else inputs.to(place))
    return outputs.to(inputs.device)


def stacked(drawn: Sequence[Draft]) -> Draft:
    """Stack K drafts of one token [B] each."""
    tokens = [draft.tokens for draft in drawn]
    probabilities = [draft.probabilities for draft in drawn]
    logits = [draft.logits for draft in drawn]
    return Draft(
        torch.stack(tokens, dim=1), torch.stack(probabilities, dim=1), torch.stack(logits, dim=1)
    )
