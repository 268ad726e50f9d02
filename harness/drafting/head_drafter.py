"""Drafting with a head: it follows the target's hidden states and draws from the target's vocabulary."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from harness.decoding.kernels import without_plans
from harness.decoding.protocols import Drafter, Proposal, Step
from harness.decoding.randomness import existing_index
from harness.decoding.transfer import Arriving, added, decided_tokens, most, to_device
from harness.decoding.warp import AnyWarp, BatchWarp
from harness.drafting.slot_cache import SlotCache

# Unread features accumulate until the next proposal; above this many they are processed early to
# bound memory.
MOST_UNREAD = 64


class Unread(NamedTuple):
    """Features of decided tokens that a head has not read.

    Attributes:
        features: [B, n, L * D], of which the first `counts` of each row are unread.
        following: [B, n], the token after each.
        counts: [B], at least 1; 0 in rows without a text.
        starts: [B], the slots of the first ones in the head's cache.
    """

    features: Tensor
    following: Tensor
    counts: Tensor
    starts: Tensor

    def last(self) -> tuple[Tensor, Tensor]:
        """Indices of each row's last unread feature."""
        last = (self.counts - 1).clamp(min=0)
        return torch.arange(len(last), device=last.device), last


class Draft(NamedTuple):
    """Tokens drawn by a head.

    Attributes:
        tokens: [B, K], the target's.
        probabilities: [B, K, V], the distributions that they were drawn from.
        logits: [B, K, V of the head], what these were made of.
        lengths: [B], how many of the tokens are offered; None for all.
    """

    tokens: Tensor
    probabilities: Tensor
    logits: Tensor
    lengths: Tensor | None = None

    def first_tokens(self, count: int) -> Draft:
        """The first tokens of each row; of those that are not offered nothing changes."""
        if self.tokens.shape[1] <= count:
            return self
        return Draft(
            self.tokens[:, :count],
            self.probabilities[:, :count],
            self.logits[:, :count],
            self.lengths,
        )


class PreparedDrafts(Protocol):
    """A head's whole proposals, prepared; see `prepared_head`."""

    cache: SlotCache

    def number_for(self, drafter: HeadDrafter, number: int) -> int | None:
        """Return the number of draft tokens of the prepared proposal that replaces one of `number`
        tokens; None where there is none.
        """

    def __call__(self, number: int, unread: Unread, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs of the prepared proposal of so many tokens."""


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
        """[B, n]."""
        device = self.features.device
        index = torch.arange(self.features.shape[1], device=device)
        first = to_device(self.first, device).unsqueeze(1)
        count = to_device(self.counts, device).unsqueeze(1)
        return (index >= first) & (index < first + count)


class HeadDrafter(Drafter):
    """A drafter over a head.

    A head with a cache has an entry there for each decided token but the last, and reads the new
    features when it proposes. The last `num_reread` of them it reads again the next time. The head
    may be on another device than the target's tokens.

    Args:
        head: a `Head`.
        target: lends its embedding and its output matrix to a head without them.
        warp: the one applied to the target's logits.

    Attributes:
        vocabulary_size: the width of the target's logits.
        prepared: drafts where it can; None where nothing is prepared.
    """

    num_reread = 0
    prepared: PreparedDrafts | None = None

    def __init__(self, head: Any, target: PreTrainedModel, warp: AnyWarp) -> None:
        self.head = head
        self.device = next(head.parameters()).device
        self._warp = warp
        self.layers = head.config.layers
        self.vocabulary_size = head.config.vocabulary_size
        self._embedding: Any = head.embed_tokens or target.get_input_embeddings()
        self._output: Any = head.lm_head or target.get_output_embeddings()
        # The target's token for each output of the head, where it knows some of them alone.
        self._tokens: Tensor | None = head.known_tokens
        self.cache = SlotCache()

    @property
    def warp(self) -> AnyWarp:
        """The warp of the batch as it is."""
        return self._warp.current if isinstance(self._warp, BatchWarp) else self._warp

    def start(
        self, prompts: Sequence[Sequence[int]], first_tokens: Sequence[int], step: Step
    ) -> None:
        self.vocabulary_size = step.logits.shape[-1]
        self.cache = SlotCache() if self.prepared is None else self.prepared.cache.twin()
        self._chunks: list[_Chunk] = []
        # Verdicts that accepted nothing, behind the chunks: hidden states [B, 1, L, D], next tokens.
        self._undrafted: list[tuple[Tensor, Sequence[int]]] = []
        # For each row: entries in the cache, and features to be read.
        self._num_cached: Sequence[int] = []
        self._num_unread: Sequence[int] = []
        self.add(prompts, first_tokens, step)

    def add(
        self, prompts: Sequence[Sequence[int]], first_tokens: Sequence[int], step: Step
    ) -> None:
        assert step.hidden is not None, "the target's runner captures no hidden states"
        self._home = step.hidden.device
        hidden = step.hidden.to(self.device)
        features: list[Tensor] = []
        following: list[Tensor] = []
        if self._num_unread:
            before = self._merged()
            features += before.features
            following += before.following
        for states, prompt, first in zip(hidden, prompts, first_tokens, strict=True):
            # Padding on a row's left may be no number at all, and must not reach the cache.
            features.append(states[-len(prompt) :].flatten(1))
            following.append(to_device([*prompt[1:], first], self.device))
        self._num_cached = [*self._num_cached, *[0] * len(prompts)]
        self._num_unread = [*self._num_unread, *map(len, prompts)]
        self.cache.ensure_rows(len(self._num_unread))
        self._chunks = [
            self._chunk(
                pad_sequence(features, batch_first=True), pad_sequence(following, batch_first=True)
            )
        ]
        self._proposed = self._chunks[0].following[:, :0]

    def _chunk(self, features: Tensor, following: Tensor) -> _Chunk:
        """A chunk of all unread features, left-aligned."""
        return _Chunk(features, following, [0] * len(features), self._num_unread)

    @torch.inference_mode()
    def propose(self, num_draft_tokens: int, uniforms: Tensor) -> Proposal:
        return self._chain(num_draft_tokens, uniforms, self.prepared)

    def _chain(
        self, num_draft_tokens: int, uniforms: Tensor, prepared: PreparedDrafts | None
    ) -> Proposal:
        outputs = self._run(self.draft, num_draft_tokens, [uniforms.to(self.device)], prepared)
        drafted = Draft(*outputs).first_tokens(num_draft_tokens)
        self._proposed = drafted.tokens
        lengths = None if drafted.lengths is None else drafted.lengths.tolist()
        tokens = drafted.tokens.to(self._home)
        return Proposal(tokens, drafted.probabilities.to(self._home), lengths)

    def _run(
        self,
        call: Callable[..., tuple[Any, ...]],
        number: int,
        inputs: Sequence[Tensor],
        prepared: PreparedDrafts | None,
    ) -> tuple[Any, ...]:
        """Read the unread features and return the outputs of a proposal, prepared where it can be.

        Args:
            call: takes `Unread` and the inputs.
            number: of draft tokens, or levels of a tree.
        """
        fitting = None if prepared is None else self._fitting(prepared, number)
        unread = self._unread()
        if prepared is None or fitting is None:
            outputs = self._run_eagerly(call, number, unread, *inputs)
        else:
            outputs = prepared(fitting, unread, *inputs)
        self._count_as_read(self.num_reread)
        return outputs

    def _fitting(self, prepared: PreparedDrafts, number: int) -> int | None:
        """Return the number of the prepared proposal that can be used now, and read features early
        that it cannot read; None where there is none, or no room for it.
        """
        fitting = prepared.number_for(self, number)
        if fitting is None:
            return None
        if most(self._num_unread) > self.most_unread(fitting):
            self._read_early()
        return fitting if self._has_room(prepared, fitting) else None

    def _run_eagerly(
        self, call: Callable[..., tuple[Any, ...]], number: int, unread: Unread, *inputs: Tensor
    ) -> tuple[Any, ...]:
        num_ahead = self.num_ahead(number)
        self.cache.num_slots = most(self._num_cached) + unread.features.shape[1] + num_ahead
        with without_plans():
            return call(unread, *inputs)

    def most_unread(self, number: int) -> int:
        """Return the most features that a row has not read after a verdict over `number` tokens."""
        return self.num_reread + number + 1

    def replace(self, tokens: Tensor, replaced: Sequence[bool]) -> None:
        """See `FollowingDrafter.replace`. Features do not depend on who proposed a token."""
        self._proposed = tokens.to(self.device)

    @torch.inference_mode()
    def observe(self, num_accepted: Sequence[int], next_tokens: Sequence[int], step: Step) -> None:
        if most(self._num_unread) > MOST_UNREAD:
            self._read_early()
        assert step.hidden is not None
        longest = most(num_accepted)
        counts = added(num_accepted, 1)
        # Counts of an earlier verdict have reached the host by now.
        self._num_cached = list(self._num_cached)
        self._num_unread = added(counts, list(self._num_unread))
        if longest or isinstance(next_tokens, Arriving):
            self._join_undrafted()
            decided = decided_tokens(self._proposed, num_accepted, next_tokens)
            features = step.hidden[:, : longest + 1].flatten(2).to(self.device)
            self._chunks.append(_Chunk(features, decided, [0] * len(counts), counts))
        else:
            # While nothing is drafted this is all: a head that does not pay must cost nothing.
            self._undrafted.append((step.hidden[:, :1], next_tokens))
        self._proposed = self._proposed[:, :0]

    def _join_undrafted(self) -> None:
        """Make a chunk of the verdicts that accepted nothing."""
        if not self._undrafted:
            return
        hidden = torch.cat([states for states, _ in self._undrafted], dim=1)
        features = hidden.flatten(2).to(self.device)
        num_rows, count = features.shape[:2]
        tokens = [token for _, next_tokens in self._undrafted for token in next_tokens]
        following = to_device(tokens, self.device).view(count, num_rows).T
        self._chunks.append(_Chunk(features, following, [0] * num_rows, [count] * num_rows))
        self._undrafted = []

    @torch.inference_mode()
    def select(self, rows: Sequence[int]) -> None:
        index = to_device(rows, self.device)
        self.cache.select(index)
        before = self._merged()
        self._num_cached = [self._num_cached[row] for row in rows]
        self._num_unread = [self._num_unread[row] for row in rows]
        self._chunks = [self._chunk(before.features[index], before.following[index])]
        self._proposed = self._chunks[0].following[:, :0]

    @abstractmethod
    def draft(self, unread: Unread, uniforms: Tensor) -> Draft:
        """Draft up to K tokens with uniforms [B, K], on the head's own device.

        It never waits for the device, and keeps nothing but entries in `cache`, of which
        `cache.num_slots` are seen.
        """

    def read(self, unread: Unread) -> Any:
        """Read the features into the cache, where the head has one."""

    def num_ahead(self, num_draft_tokens: int) -> int:
        """The most slots behind the unread features that a proposal writes."""
        return num_draft_tokens

    def num_drafted(self, number: int) -> int:
        """Return how many of `number` tokens, or levels of a tree, the head can draft."""
        return number

    def _read_early(self) -> None:
        """Read all features; of each row the last one is read again with those that follow."""
        unread = self._unread()
        self.cache.num_slots = most(self._num_cached) + unread.features.shape[1]
        with without_plans():
            self.read(unread)
        self._count_as_read(max(1, self.num_reread))

    def _unread(self) -> Unread:
        chunk = self._merged()
        self._chunks = [chunk]
        counts = to_device(self._num_unread, self.device)
        starts = to_device(self._num_cached, self.device)
        return Unread(chunk.features, chunk.following, counts, starts)

    def _merged(self) -> _Chunk:
        """All unread features, left-aligned."""
        self._join_undrafted()
        chunks = self._chunks
        if len(chunks) == 1 and not any(chunks[0].first):
            return chunks[0]
        features = torch.cat([chunk.features for chunk in chunks], dim=1)
        following = torch.cat([chunk.following for chunk in chunks], dim=1)
        is_unread = torch.cat([chunk.is_unread() for chunk in chunks], dim=1)
        order = is_unread.int().argsort(dim=1, descending=True, stable=True)
        order = order[:, : most(self._num_unread)]
        rows = torch.arange(len(order), device=order.device).unsqueeze(1)
        return self._chunk(features[rows, order], following[rows, order])

    def _count_as_read(self, num_again: int) -> None:
        """Count all features of the only chunk as read, but for the last `num_again` of each row."""
        (chunk,) = self._chunks
        again = [0] * len(self._num_unread)
        if num_again:
            again = [min(num_again, count) for count in self._num_unread]
        first = added(self._num_unread, [-count for count in again])
        self._num_cached = added(first, self._num_cached)
        self._num_unread = again
        self._chunks = []
        if num_again:
            self._chunks = [_Chunk(chunk.features, chunk.following, first, again)]

    def _has_room(self, prepared: PreparedDrafts, number: int) -> bool:
        """Whether the cache is the prepared one, with room for a prepared proposal."""
        cache = prepared.cache
        needed = most(self._num_cached) + self.most_unread(number) + self.num_ahead(number)
        return needed <= cache.num_slots and self.cache.shares(cache)

    def _embed(self, tokens: Tensor) -> Tensor:
        """Embed tokens, by the head's matrix or the target's."""
        return _call_elsewhere(self._embedding, tokens)

    def _logits(self, states: Tensor) -> Tensor:
        """Turn states [..., D], after the final norm, into logits [..., V of the head]."""
        logits = _call_elsewhere(self._output, states)
        return logits if self._tokens is not None else logits[..., : self.vocabulary_size]

    def draw(self, logits: Tensor, uniforms: Tensor) -> Draft:
        """Draw by logits [B, ..., V of the head] and uniforms [B, ...]."""
        probabilities = self._warp(logits)
        drawn = existing_index(probabilities, uniforms)
        if self._tokens is None:
            return Draft(drawn, probabilities, logits)
        whole = probabilities.new_zeros(*probabilities.shape[:-1], self.vocabulary_size)
        whole = whole.index_copy_(-1, self._tokens, probabilities)
        return Draft(self._tokens[drawn], whole, logits)


def _call_elsewhere(module: Any, inputs: Tensor) -> Tensor:
    """Apply a matrix that may be on another device."""
    place = module.weight.device
    # One that is offloaded is brought in by its own hook.
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
