"""Drafting with a head: it follows the target's hidden states and draws from the target's vocabulary."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from harness.decoding.kernels import without_plans
from harness.decoding.protocols import Drafter, Proposal, Step
from harness.decoding.randomness import existing_index
from harness.decoding.transfer import added, most, to_device
from harness.decoding.warp import AnyWarp
from harness.drafting.slot_cache import SlotCache

# Unread features accumulate until the next proposal; above this many they are processed early to
# bound memory.
MOST_UNREAD = 64


class HeadDrafter(Drafter):
    """A drafter over a head.

    A head with a cache has an entry there for each decided token but the last, and reads the new
    features when it proposes. The last `num_reread` of them it reads again the next time. The head
    may be on another device than the target's tokens.

    Args:
        head: a `Head`.
        target: lends its embedding and its output matrix to a head without them.
        warp: the one applied to the target's logits.
    """

    num_reread = 0

    def __init__(self, head: Any, target: PreTrainedModel, warp: AnyWarp) -> None:
        self._head = head
        self._warp = warp
        self._device = next(head.parameters()).device
        self.layers = head.config.layers
        self._vocabulary_size = head.config.vocabulary_size
        self._embedding: Any = head.embed_tokens or target.get_input_embeddings()
        self._output: Any = head.lm_head or target.get_output_embeddings()
        # The target's token for each output of the head, where it knows some of them alone.
        self._tokens: Tensor | None = head.known_tokens

    def start(
        self, prompts: Sequence[Sequence[int]], first_tokens: Sequence[int], step: Step
    ) -> None:
        """See `Drafter.start`."""
        self._vocabulary_size = step.logits.shape[-1]
        self._cache = SlotCache()
        # Features [B, n, L * D] and the token [B, n] that follows each.
        self._features = torch.empty(0)
        self._following = torch.empty(0)
        # For each row: entries in the cache, features to be read, and where these begin.
        self._num_cached: Sequence[int] = []
        self._num_unread: Sequence[int] = []
        self._first_unread: Sequence[int] = []
        self.add(prompts, first_tokens, step)

    def add(
        self, prompts: Sequence[Sequence[int]], first_tokens: Sequence[int], step: Step
    ) -> None:
        """See `Drafter.add`."""
        assert step.hidden is not None, "the target's runner captures no hidden states"
        self._home = step.hidden.device
        hidden = step.hidden.to(self._device)
        features, following = list(self._features), list(self._following)
        for states, prompt, first in zip(hidden, prompts, first_tokens, strict=True):
            # Padding on a row's left may be no number at all, and must not reach the cache.
            features.append(states[-len(prompt) :].flatten(1))
            following.append(to_device([*prompt[1:], first], self._device))
        self._features = pad_sequence(features, batch_first=True)
        self._following = pad_sequence(following, batch_first=True)
        self._proposed = self._following[:, :0]
        self._num_cached = [*self._num_cached, *[0] * len(prompts)]
        self._num_unread = [*self._num_unread, *map(len, prompts)]
        self._first_unread = [0] * len(self._num_unread)
        self._cache.add(len(prompts))

    @torch.inference_mode()
    def propose(self, num_draft_tokens: int, uniforms: Tensor) -> Proposal:
        """See `Drafter.propose`."""
        with without_plans():
            proposal = self._draft(num_draft_tokens, uniforms)
        assert proposal.probabilities is not None
        self._proposed = proposal.tokens
        tokens = proposal.tokens.to(self._home)
        return Proposal(tokens, proposal.probabilities.to(self._home), proposal.lengths)

    @torch.inference_mode()
    def observe(self, num_accepted: Sequence[int], next_tokens: Sequence[int], step: Step) -> None:
        """See `Drafter.observe`."""
        if max(self._num_unread) > MOST_UNREAD:
            with without_plans():
                self._read()
        assert step.hidden is not None
        longest = most(num_accepted)
        decided = self._decided(num_accepted, next_tokens, longest)
        features = step.hidden[:, : longest + 1].flatten(2).to(self._device)
        self._features = self._append(self._features, features)
        self._following = self._append(self._following, decided)
        self._proposed = decided[:, :0]
        # Counts of an earlier verdict have reached the host by now.
        self._num_cached = list(self._num_cached)
        self._num_unread = added(num_accepted, [count + 1 for count in self._num_unread])
        self._first_unread = [0] * len(self._num_unread)

    def _decided(
        self, num_accepted: Sequence[int], next_tokens: Sequence[int], longest: int
    ) -> Tensor:
        """The tokens [B, longest + 1] that a verdict decided: accepted ones, then the next."""
        accepted = self._proposed[:, :longest]
        room = accepted.new_zeros(len(next_tokens), 1)
        places = to_device(num_accepted, self._device).unsqueeze(1)
        following = to_device(next_tokens, self._device).unsqueeze(1)
        return torch.cat([accepted, room], dim=1).scatter_(1, places, following)

    def select(self, rows: Sequence[int]) -> None:
        """See `Drafter.select`."""
        index = to_device(rows, self._device)
        self._cache.select(index)
        self._features = self._features[index]
        self._following = self._following[index]
        self._proposed = self._following[:, :0]
        self._num_cached = [self._num_cached[row] for row in rows]
        self._num_unread = [self._num_unread[row] for row in rows]
        self._first_unread = [0] * len(rows)

    @abstractmethod
    def _draft(self, num_draft_tokens: int, uniforms: Tensor) -> Proposal:
        """Draft on the head's own device; see `Drafter.propose`."""

    def _read(self) -> Any:
        """Read the new features into the cache, where the head has one."""
        self._place_unread()

    def _ends(self) -> tuple[Tensor, Tensor]:
        """Indices of each row's last unread feature."""
        last = to_device(self._num_unread, self._device) - 1
        return torch.arange(len(last), device=last.device), last

    def _place(self, count: int, ahead: int = 0) -> None:
        """Make the cache write `count` entries of each row next, `ahead` behind its last one."""
        starts = to_device(self._num_cached, self._device).unsqueeze(1) + ahead
        self._cache.positions = starts + torch.arange(count, device=starts.device)
        self._cache.num_slots = most(self._num_cached) + ahead + count

    def _place_unread(self, num_masks: int = 0) -> None:
        """Make the cache write the unread features next, and masks behind them; they count as read."""
        self._place(self._features.shape[1] + num_masks)
        again = [0] * len(self._num_unread)
        if self.num_reread:
            again = [min(self.num_reread, count) for count in self._num_unread]
        self._first_unread = added(self._num_unread, [-count for count in again])
        self._num_cached = added(self._first_unread, self._num_cached)
        self._num_unread = again

    def _append(self, entries: Tensor, new: Tensor) -> Tensor:
        """Unread entries [B, n, ...] and the new ones [B, m, ...] behind them, left-aligned."""
        if not max(self._num_unread):
            return new
        first = to_device(self._first_unread, entries.device).unsqueeze(1)
        count = to_device(self._num_unread, entries.device).unsqueeze(1)
        index = torch.arange(max(self._num_unread) + new.shape[1], device=entries.device)
        shift = torch.where(index < count, first, entries.shape[1] - count)
        joined = torch.cat([entries, new], dim=1)
        sources = (index + shift).clamp(max=joined.shape[1] - 1)
        rows = torch.arange(len(entries), device=entries.device).unsqueeze(1)
        return joined[rows, sources]

    def _embed(self, tokens: Tensor) -> Tensor:
        """Embed tokens, by the head's matrix or the target's."""
        return _call_elsewhere(self._embedding, tokens)

    def _logits(self, states: Tensor) -> Tensor:
        """Turn states [..., D], after the final norm, into logits [..., V of the head]."""
        logits = _call_elsewhere(self._output, states)
        return logits if self._tokens is not None else logits[..., : self._vocabulary_size]

    def _draw(self, logits: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """Draw by logits [..., V of the head] and uniforms [...].

        Returns the target's tokens [...] and the distributions [..., V] that they were drawn from.
        """
        probabilities = self._warp(logits)
        drawn = existing_index(probabilities, uniforms.to(logits.device))
        if self._tokens is None:
            return drawn, probabilities
        whole = probabilities.new_zeros(*probabilities.shape[:-1], self._vocabulary_size)
        return self._tokens[drawn], whole.index_copy_(-1, self._tokens, probabilities)


def _call_elsewhere(module: Any, inputs: Tensor) -> Tensor:
    """Apply a matrix that may be on another device."""
    place = module.weight.device
    # One that is offloaded is brought in by its own hook.
    outputs = module(inputs if place.type == "meta" else inputs.to(place))
    return outputs.to(inputs.device)


def stacked(drawn: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Stack K times tokens [B] and distributions [B, V] to [B, K] and [B, K, V]."""
    tokens = [tokens for tokens, _ in drawn]
    probabilities = [distribution for _, distribution in drawn]
    return torch.stack(tokens, dim=1), torch.stack(probabilities, dim=1)
