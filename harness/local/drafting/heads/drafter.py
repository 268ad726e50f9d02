"""Drafting with a head: what the drafters of all kinds of heads have in common.

A head continues from features, the target's own hidden states. `observe` keeps those of the decided
tokens (`unread`). `propose` then hands them to the kind's `draft`, which reads them into the head's
cache and draws K tokens. `draft` is a function of tensors, so that `prepared` can compile or
capture it; where nothing is prepared, or nothing that fits, it runs eagerly.

For trees (`propose_tree`) a kind has `predictor` instead, which reads the features and then predicts
the tokens of a tree level by level. What it must know of a node differs from kind to kind:

    EAGLE-3            the whole path to it: a pass for each level (in `kinds/eagle3`)
    DSpark, DFlash 2   its level and its own token: `TokenPredictor`
    the others         its level alone: `MarginalPredictor`
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from harness.local.decoding.protocols import Cached, Proposal, Step, TreeDrafter
from harness.local.decoding.randomness import existing_index
from harness.local.decoding.transfer import most, to_device
from harness.local.decoding.trees import TreeProposal
from harness.local.decoding.warp import AnyWarp, current_warp
from harness.local.drafting.heads.slot_cache import SlotCache
from harness.local.drafting.heads.unread import Unread, UnreadFeatures
from harness.local.drafting.teacher_forcing import (
    CHUNK,
    as_offered,
    in_parts,
    places_of,
    upcoming,
)
from harness.local.drafting.trees.growth import Grown, Growth, Predictor, trees_of
from harness.local.runners.attention import without_cudnn

# Unread features accumulate until the next proposal; above this many they are processed early to
# bound memory.
MOST_UNREAD = 64
# In the rows that draft at once behind places of a text.
_MOST_NUMBERS = 2**27


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


class PreparedDrafts(Protocol):
    """A head's whole proposals as prepared calls: `PreparedHead`, or `PreparedTrees` for trees.

    Attributes:
        cache: the one that the calls use, of fixed size.
    """

    cache: SlotCache

    def number_for(self, drafter: HeadDrafter, number: int) -> int | None:
        """Return the number of draft tokens of the prepared proposal that serves for one of
        `number` tokens; None where there is none. A proposal of trees has levels instead.
        """

    def __call__(self, number: int, unread: Unread, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs of the prepared proposal of `number` tokens or levels.

        Args:
            inputs: what `draft` takes beside `unread`, which is uniforms [B, K]; nothing for trees.
        """


class HeadDrafter(TreeDrafter):
    """A drafter over a head; each kind adds `draft`, and `predictor` where it drafts trees.

    A head with a cache has an entry there for each decided token but the last, which has no
    features yet. The head may be on another device than the target's tokens.

    Args:
        head: a `blocks.Head`.
        target: lends its embedding and its output matrix to a head without them.
        warp: the one applied to the target's logits.
        budget: the most nodes of a tree; 0 for a drafter of chains.
        confidence: offer tokens only as far as a confidence head (DSpark) expects each to be
            accepted with at least this probability; 0 offers all.

    Attributes:
        num_reread: how many of the last features of each row are read again with the next ones.
        vocabulary_size: the width of the target's logits.
        prepared: drafts in place of `draft` or `grow` where it can; None where nothing is prepared.
        cache: the head's.
    """

    num_reread = 0
    prepared: PreparedDrafts | None = None

    def __init__(
        self,
        head: Any,
        target: PreTrainedModel,
        warp: AnyWarp,
        budget: int = 0,
        confidence: float = 0.0,
    ) -> None:
        self.head = head
        self.budget = budget
        self.device = next(head.parameters()).device
        self._warp = warp
        self._confidence = confidence
        self.layers = head.config.layers
        self.cached_layers = head.config.cached_layers
        self.vocabulary_size = head.config.vocabulary_size
        self._embedding: Any = head.embed_tokens or target.get_input_embeddings()
        self._output: Any = head.lm_head or target.get_output_embeddings()
        self._known_tokens: Tensor | None = head.known_tokens
        self.cache = SlotCache()

    @property
    def devices(self) -> set[torch.device]:
        """Where the head is, and the layers that it may borrow."""
        borrowed = (self._embedding, self._output)
        return {self.device, *(module.weight.device for module in borrowed)}

    @property
    def warp(self) -> AnyWarp:
        """The warp of the batch as it is now."""
        return current_warp(self._warp)

    def cached(self) -> Cached:
        """Return the target's keys and values of `cached_layers`, as its runner has them now."""
        assert self.target_runner is not None
        return self.target_runner.cached(self.cached_layers)

    @abstractmethod
    def draft(self, unread: Unread, uniforms: Tensor) -> Draft:
        """Read the features, and draft up to K tokens with uniforms [B, K], on the head's device.

        It never waits for the device, and changes nothing but the entries of `cache`. Its first
        `cache.num_slots` slots are those that it may write and see.
        """

    def predictor(self, unread: Unread, depth: int) -> Predictor:
        """Read the features, and return what predicts the tokens of a tree of at most `depth`
        levels, where `HeadKind.drafts_trees`.
        """
        raise NotImplementedError

    def read(self, unread: Unread) -> Any:
        """Read the features into the cache; a head without one has nothing to do."""

    def num_ahead(self, num_draft_tokens: int) -> int:
        """Return how many slots behind the unread features a proposal may write."""
        return num_draft_tokens

    def num_drafted(self, number: int) -> int:
        """Return how many of `number` tokens, or levels of a tree, the head can draft."""
        return number

    def most_unread(self, number: int) -> int:
        """Return how many features a row can have unread after a verdict over `number` tokens."""
        return self.num_reread + number + 1

    def start(
        self, prompts: Sequence[Sequence[int]], first_tokens: Sequence[int], step: Step
    ) -> None:
        self.vocabulary_size = step.logits.shape[-1]
        # The cache shares the captured buffers. If it outgrows them it is copied, and proposals run
        # eagerly.
        self.cache = SlotCache() if self.prepared is None else self.prepared.cache.twin()
        self._unread = UnreadFeatures(self.device)
        self.add(prompts, first_tokens, step)

    def add(
        self, prompts: Sequence[Sequence[int]], first_tokens: Sequence[int], step: Step
    ) -> None:
        assert step.hidden is not None, "the target's runner captures no hidden states"
        # Where proposals are wanted.
        self._target_device = step.hidden.device
        self._unread.add(step.hidden.to(self.device), prompts, first_tokens)
        self.cache.ensure_rows(len(self._unread.counts))
        self._propose_nothing()

    def _propose_nothing(self) -> None:
        """Forget the last proposal: a verdict that follows is over no draft tokens."""
        num_rows = len(self._unread.counts)
        self._proposed = torch.empty(num_rows, 0, dtype=torch.long, device=self.device)

    @torch.inference_mode()
    def propose(self, num_draft_tokens: int, uniforms: Tensor) -> Proposal:
        # With a budget `prepared` has trees; a chain, which only references ask for, is then eager.
        prepared = None if self.budget else self.prepared
        outputs = self._run(self.draft, num_draft_tokens, [uniforms.to(self.device)], prepared)
        drafted = Draft(*outputs)
        # A prepared proposal may have more tokens, and offer more.
        tokens = drafted.tokens[:, :num_draft_tokens]
        probabilities = drafted.probabilities[:, :num_draft_tokens]
        lengths = None
        if drafted.lengths is not None:
            lengths = drafted.lengths.clamp(max=num_draft_tokens).tolist()
        self._proposed = tokens
        return Proposal(
            tokens.to(self._target_device), probabilities.to(self._target_device), lengths
        )

    @torch.inference_mode()
    def propose_tree(self, depth: int) -> TreeProposal:
        depth = self.num_drafted(depth)
        call = functools.partial(self.grow, depth)
        proposal = trees_of(Grown(*self._run(call, depth, [], self.prepared)))
        self._proposed = proposal.tokens
        return proposal.to(self._target_device)

    def grow(self, depth: int, unread: Unread) -> Grown:
        """Read the features and grow trees.

        Bound to a depth it is a function of tensors, as `draft` is, which `prepared_trees` compiles
        or captures.
        """
        return Growth(depth, self.budget).grow(self.predictor(unread, depth))

    def follow(self, path: Tensor) -> None:
        self._proposed = self._proposed.gather(1, (path - 1).to(self.device))

    def _run(
        self,
        call: Callable[..., tuple[Any, ...]],
        number: int,
        inputs: Sequence[Tensor],
        prepared: PreparedDrafts | None,
    ) -> tuple[Any, ...]:
        """Return the outputs of a proposal, by a prepared call where one fits.

        Args:
            call: the eager proposal, `draft` or `grow`: it takes `Unread` and the inputs.
            number: how many tokens to draft, or levels of a tree.
            inputs: as of `PreparedDrafts.__call__`.
        """
        fitting = None if prepared is None else prepared.number_for(self, number)
        if prepared is not None and fitting is not None:
            # A prepared call reads as many features as a verdict can leave; others before it.
            most_unread = self.most_unread(fitting)
            if most(self._unread.counts) > most_unread:
                self._read_early()
            # Rows or texts that outgrow the prepared cache go on eagerly, in a cache of their own.
            needed = most(self._unread.num_read) + most_unread + self.num_ahead(fitting)
            if needed > prepared.cache.num_slots or not self.cache.shares(prepared.cache):
                fitting = None
        unread = self._unread.all()
        if prepared is None or fitting is None:
            outputs = self._run_eagerly(call, number, unread, *inputs)
        else:
            outputs = prepared(fitting, unread, *inputs)
        self._unread.count_as_read(self.num_reread)
        return outputs

    def _run_eagerly(
        self, call: Callable[..., tuple[Any, ...]], number: int, unread: Unread, *inputs: Tensor
    ) -> tuple[Any, ...]:
        num_read = most(self._unread.num_read)
        self.cache.num_slots = num_read + unread.features.shape[1] + self.num_ahead(number)
        with without_cudnn():
            return call(unread, *inputs)

    @torch.inference_mode()
    def observe(self, num_accepted: Sequence[int], next_tokens: Sequence[int], step: Step) -> None:
        if most(self._unread.counts) > MOST_UNREAD:
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

    @torch.inference_mode()
    def along(
        self, tokens: Sequence[int], answers: Sequence[range], hidden: Tensor | None, most: int
    ) -> Tensor:
        """Read the whole text once; then each place is a row that drafts behind its own beginning of it."""
        assert hidden is not None
        device = self.device
        features = hidden.flatten(1).to(device)
        following = to_device(tokens, device)[1:]
        num_features = len(features)
        self.cache = SlotCache()
        self.cache.num_slots = num_features + self.num_ahead(most)
        start = following.new_zeros(1)
        parts = []
        with without_cudnn():
            for begin in range(0, num_features, CHUNK):
                first = max(0, begin - self.num_reread)
                part = slice(first, begin + CHUNK)
                counts = start + len(features[part])
                self.read(
                    Unread(features[None, part], following[None, part], counts, start + first)
                )
            of_text = self.cache
            # Each row has the cache of the whole text, and the probabilities of all tokens.
            numbers_per_row = of_text.num_slots * of_text.numbers_per_token
            numbers_per_row += most * self.vocabulary_size
            at_once = max(1, _MOST_NUMBERS // numbers_per_row)
            for numbers in in_parts(places_of(answers), at_once):
                places = to_device(numbers, device)
                # The last feature before each place; an iteration reads it, and as many before it as are read again.
                last = places - 1
                starts = (last - self.num_reread).clamp(min=0)
                index = starts.unsqueeze(1) + torch.arange(self.num_reread + 1, device=device)
                index = index.clamp(max=num_features - 1)
                unread = Unread(features[index], following[index], last - starts + 1, starts)
                self.cache = of_text.twin()
                self.cache.repeat(torch.zeros_like(places))
                expected = upcoming(tokens, numbers, most).to(device)
                # The text's own tokens, which `draw` takes; any token beyond the text.
                taken = expected.clamp(min=0)
                drafted = self.draft(unread, taken)
                index = taken[:, : drafted.tokens.shape[1]].unsqueeze(-1)
                found = drafted.probabilities.gather(-1, index).squeeze(-1)
                parts.append(as_offered(found, expected, drafted.lengths))
        return torch.cat(parts)

    def _read_early(self) -> None:
        """Read all features now. The last one of each row is read again with those that follow,
        because `draft` needs at least one.
        """
        unread = self._unread.all()
        self.cache.num_slots = most(self._unread.num_read) + unread.features.shape[1]
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
        uniforms are tokens to take (`along`).
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
