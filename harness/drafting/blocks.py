"""What the draft heads share: layers over a cache with one slot per position, and the target's vocabulary.

A head is a few layers that were trained to continue from the target's own hidden states. Its weights have the names of
the published formats, so a checkpoint loads without a table of names.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from harness.decoding.kernels import without_plans
from harness.decoding.protocols import Drafter, Proposal, Step
from harness.decoding.randomness import existing_index
from harness.decoding.transfer import added, most, to_device
from harness.decoding.warp import AnyWarp
from harness.drafting.lesson import Lesson

# The styles of layers that heads have, by transformers' name.
LAYER_STYLES: dict[str, type[nn.Module]] = {"llama": LlamaDecoderLayer, "qwen3": Qwen3DecoderLayer}

# By which a full cache grows.
SPARE_SLOTS = 256

# Features that wait for a proposal are read at once, but take memory, and are copied when others join them.
MOST_UNREAD = 64


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """A head, in any stored format. Each kind adds to it.

    Attributes:
        layers: of the target, as in `Drafter.layers`.
        target_size: the width of their hidden states.
        vocabulary_size: of the target.
        draft_vocabulary_size: of the head's output; where it is smaller, `d2t` says which tokens these are.
        own_embedding: whether the head has an embedding; otherwise the target's is used.
        own_output: whether it has an output matrix; likewise. A smaller vocabulary needs one.
    """

    layers: tuple[int, ...]
    target_size: int
    vocabulary_size: int
    draft_vocabulary_size: int
    own_embedding: bool = False
    own_output: bool = False

    @property
    def borrowed_outputs(self) -> int:
        """Numbers of the target's output matrix that drafting a token reads."""
        return 0 if self.own_output else self.target_size * self.vocabulary_size


class Head(nn.Module):
    """The part of a head's weights that maps tokens to states of `width` numbers and back."""

    d2t: Tensor | None
    config: Any  # of the kind's own class

    def __init__(self, config: HeadConfig, width: int) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = (
            nn.Embedding(config.vocabulary_size, width) if config.own_embedding else None
        )
        self.lm_head = (
            nn.Linear(width, config.draft_vocabulary_size, bias=False)
            if config.own_output
            else None
        )
        # Added to a token of the head it gives the target's.
        reduced = config.draft_vocabulary_size != config.vocabulary_size
        offsets = torch.zeros(config.draft_vocabulary_size, dtype=torch.long) if reduced else None
        self.register_buffer("d2t", offsets)

    @property
    def known_tokens(self) -> Tensor | None:
        """The target's tokens that a head of a smaller vocabulary can draft; None for all."""
        if self.d2t is None:
            return None
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def drafter(
        self, target: PreTrainedModel, warp: AnyWarp, confidence: float = 0.0
    ) -> HeadDrafter:
        """Drafts with these weights.

        Args:
            target: lends embedding and output matrix to heads without their own.
            warp: from logits to the distributions that tokens are drawn from.
            confidence: offer tokens only as far as a confidence head expects each to be accepted with at least this
                probability; 0 offers all.
        """
        raise NotImplementedError

    def loss(self, lesson: Lesson, embedding: Any, output: Any, num_steps: int) -> Tensor:
        """What training makes small.

        Args:
            embedding: of tokens, the head's own or the target's.
            output: matrix, likewise.
            num_steps: tokens ahead that a chain is trained to draft.
        """
        raise NotImplementedError


class LayeredHead(Head):
    """A head with transformer layers."""

    norm: nn.Module
    rotary_emb: nn.Module

    def __init__(self, config: HeadConfig, own: PreTrainedConfig, style: str) -> None:
        super().__init__(config, own.hidden_size)
        own._attn_implementation = "sdpa"
        self.fc = nn.Linear(len(config.layers) * config.target_size, own.hidden_size, bias=False)
        layer: Any = LAYER_STYLES[style]
        self.layers = nn.ModuleList(layer(own, index) for index in range(own.num_hidden_layers))
        self.norm = LlamaRMSNorm(own.hidden_size, own.rms_norm_eps)
        # Its buffers are in no checkpoint, so they must have numbers even where the module is made without memory.
        with torch.device("cpu"):
            self.rotary_emb = LlamaRotaryEmbedding(cast(Any, own))
        self.windows = windows(own)


def windows(own: PreTrainedConfig) -> list[int | None]:
    """The sliding window of each layer, None without one."""
    kinds = getattr(own, "layer_types", None) or ["full_attention"] * own.num_hidden_layers
    return [
        getattr(own, "sliding_window", None) if kind.startswith("sliding") else None
        for kind in kinds
    ]


class SlotCache:
    """Keys and values of a head's layers: the entry at position p of a row is in slot p.

    Every query says which slots it sees. So entries that were made from rejected tokens need no removal: they are
    overwritten before their positions are seen.
    """

    def __init__(self) -> None:
        self._layers: dict[int, tuple[Tensor, ...]] = {}
        self.positions = torch.empty(0, dtype=torch.long)  # [B, n] of what `update` writes next
        self.num_slots = 0  # that queries may see

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write [B, heads, n, D] each -> all slots, [B, heads, S, D]. Called by transformers' attention."""
        new, held = (keys, values), self._layers.get(layer)
        if held is None or held[0].shape[2] < self.num_slots:
            size = self.num_slots + SPARE_SLOTS
            larger = tuple(one.new_zeros(*one.shape[:2], size, one.shape[3]) for one in new)
            for buffer, old in zip(larger, held or (), strict=False):
                buffer[:, :, : old.shape[2]] = old
            held = self._layers[layer] = larger
        for buffer, states in zip(held, new, strict=True):
            buffer.scatter_(2, self.positions[:, None, :, None].expand_as(states), states)
        return held[0][:, :, : self.num_slots], held[1][:, :, : self.num_slots]

    def add(self, num_rows: int) -> None:
        """Add empty rows behind the others."""
        padding = (0, 0, 0, 0, 0, 0, 0, num_rows)
        self._layers = {
            layer: tuple(nn.functional.pad(one, padding) for one in held)
            for layer, held in self._layers.items()
        }

    @property
    def token_size(self) -> int:
        """Numbers of one entry, in all layers."""
        return sum(one.shape[1] * one.shape[3] for held in self._layers.values() for one in held)

    def causal(self, window: int | None) -> Tensor:
        """The slots up to each query's own, within the window -> a mask as from `seen`."""
        last = self.positions
        return self.seen(torch.zeros_like(last) if window is None else last - window + 1, last)

    def seen(self, first: Tensor, last: Tensor) -> Tensor:
        """Which slots queries [B, n] see, from `first` to `last` [B, n] -> a mask [B, 1, n, S]."""
        slots = torch.arange(self.num_slots, device=last.device)
        return ((slots >= first.unsqueeze(-1)) & (slots <= last.unsqueeze(-1))).unsqueeze(1)

    def select(self, rows: Tensor) -> None:
        self._layers = {
            layer: tuple(one[rows] for one in held) for layer, held in self._layers.items()
        }


class HeadDrafter(Drafter):
    """What all drafters over heads do: follow the target's hidden states, and draw from its vocabulary.

    A head with a cache has an entry there for each decided token but the last, and reads what is new when it proposes.
    The last `_again` of them it reads again the next time. It may be on another device than the target's tokens.

    Args:
        target: lends its embedding and its output matrix to a head without them.
        warp: the one applied to the target's logits.
    """

    _again = 0

    def __init__(self, head: Any, target: PreTrainedModel, warp: AnyWarp) -> None:
        self._head, self._warp, self._device = head, warp, next(head.parameters()).device
        self.layers, self._vocabulary_size = head.config.layers, head.config.vocabulary_size
        self._embedding: Any = head.embed_tokens or target.get_input_embeddings()
        self._output: Any = head.lm_head or target.get_output_embeddings()
        # Of the target, for each output of the head.
        self._tokens = (
            None
            if head.d2t is None
            else head.d2t + torch.arange(len(head.d2t), device=self._device)
        )

    def start(
        self, prompts: Sequence[Sequence[int]], first_tokens: Sequence[int], step: Step
    ) -> None:
        self._vocabulary_size = step.logits.shape[-1]
        self._cache = SlotCache()
        self._lengths: Sequence[int] = []  # entries of each row in the cache
        self._features = torch.empty(0)  # [B, n, L * D]
        self._following = torch.empty(0)  # [B, n] the token after each
        self._first: Sequence[int] = []  # of the features of each row that are to be read, and
        self._new: Sequence[int] = []  # how many these are
        self.add(prompts, first_tokens, step)

    def add(
        self, prompts: Sequence[Sequence[int]], first_tokens: Sequence[int], step: Step
    ) -> None:
        assert step.hidden is not None, "the target's runner captures no hidden states"
        self._home = step.hidden.device
        features, following = [*self._features], [*self._following]
        for states, prompt, first in zip(
            step.hidden.to(self._device), prompts, first_tokens, strict=True
        ):
            # What padded the row on the left may be no number at all, and must not reach the cache.
            features.append(states[-len(prompt) :].flatten(1))
            following.append(to_device([*prompt[1:], first], self._device))
        self._features = pad_sequence(features, batch_first=True)
        self._following = pad_sequence(following, batch_first=True)
        self._proposed = self._following[:, :0]  # [B, K]
        self._new, self._lengths = (
            [*self._new, *map(len, prompts)],
            [*self._lengths, *[0] * len(prompts)],
        )
        self._first = [0] * len(self._new)
        self._cache.add(len(prompts))

    @torch.inference_mode()
    def propose(self, num_draft_tokens: int, uniforms: Tensor) -> Proposal:
        with without_plans():
            proposal = self._draft(num_draft_tokens, uniforms)
        self._proposed, probabilities = proposal.tokens, proposal.probabilities
        assert probabilities is not None
        return Proposal(
            self._proposed.to(self._home), probabilities.to(self._home), proposal.lengths
        )

    @torch.inference_mode()
    def observe(self, num_accepted: Sequence[int], next_tokens: Sequence[int], step: Step) -> None:
        if max(self._new) > MOST_UNREAD:
            with without_plans():
                self._read()
        assert step.hidden is not None
        longest = most(num_accepted)
        decided = torch.cat(
            [self._proposed[:, :longest], self._proposed.new_zeros(len(next_tokens), 1)], dim=1
        )
        last = to_device(num_accepted, self._device).unsqueeze(1)
        decided = decided.scatter_(1, last, to_device(next_tokens, self._device).unsqueeze(1))
        self._features = self._behind(
            self._features, step.hidden[:, : longest + 1].flatten(2).to(self._device)
        )
        self._following, self._proposed = self._behind(self._following, decided), decided[:, :0]
        self._lengths = list(self._lengths)  # of an earlier verdict the host has read them by now
        self._new = added(num_accepted, [new + 1 for new in self._new])
        self._first = [0] * len(self._new)

    def select(self, rows: Sequence[int]) -> None:
        index = to_device(rows, self._device)
        self._cache.select(index)
        self._features, self._following = self._features[index], self._following[index]
        self._lengths, self._new = (
            [self._lengths[row] for row in rows],
            [self._new[row] for row in rows],
        )
        self._first = [0] * len(rows)
        self._proposed = self._following[:, :0]

    @abstractmethod
    def _draft(self, num_draft_tokens: int, uniforms: Tensor) -> Proposal:
        """See `propose`."""

    def _read(self) -> Any:
        """Read the new features into the cache, where the head has one."""
        self._place_new()

    def _ends(self) -> tuple[Tensor, Tensor]:
        """Indices of each row's last new feature."""
        last = to_device(self._new, self._device) - 1
        return torch.arange(len(last), device=last.device), last

    def _place(self, count: int, ahead: int = 0) -> None:
        """The cache writes next `count` entries of each row, so many behind its last one."""
        starts = to_device(self._lengths, self._device).unsqueeze(1) + ahead
        self._cache.positions = starts + torch.arange(count, device=starts.device)
        self._cache.num_slots = most(self._lengths) + ahead + count

    def _place_new(self, num_masks: int = 0) -> None:
        """The cache writes next the new features, which are new no longer, and masks after them."""
        self._place(self._features.shape[1] + num_masks)
        again = (
            [min(self._again, new) for new in self._new] if self._again else [0] * len(self._new)
        )
        self._first = added(self._new, [-count for count in again])
        self._lengths, self._new = added(self._first, self._lengths), again

    def _behind(self, held: Tensor, found: Tensor) -> Tensor:
        """Entries [B, n, ...] that are to be read, then the ones [B, m, ...] that a verdict adds; left-aligned."""
        if not max(self._new):
            return found
        first, count = (
            to_device(numbers, held.device).unsqueeze(1) for numbers in (self._first, self._new)
        )
        index = torch.arange(max(self._new) + found.shape[1], device=held.device)
        sources = index + torch.where(index < count, first, held.shape[1] - count)
        joined = torch.cat([held, found], dim=1)
        rows = torch.arange(len(held), device=held.device).unsqueeze(1)
        return joined[rows, sources.clamp(max=joined.shape[1] - 1)]

    def _embed(self, tokens: Tensor) -> Tensor:
        return _called(self._embedding, tokens)

    def _logits(self, states: Tensor) -> Tensor:
        """States [..., D], after the final norm -> logits [..., V of the head]."""
        logits = _called(self._output, states)
        return logits if self._tokens is not None else logits[..., : self._vocabulary_size]

    def _draw(self, logits: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [..., V of the head], uniforms [...] -> tokens of the target [...], probabilities [..., V]."""
        probabilities = self._warp(logits)
        drawn = existing_index(probabilities, uniforms.to(logits.device))
        if self._tokens is None:
            return drawn, probabilities
        spread = probabilities.new_zeros(*probabilities.shape[:-1], self._vocabulary_size)
        return self._tokens[drawn], spread.index_copy_(-1, self._tokens, probabilities)


def _called(module: Any, inputs: Tensor) -> Tensor:
    """What a matrix of the head or of the target, perhaps on another device, makes of inputs."""
    place = module.weight.device
    # One that is offloaded is brought in by its own hook.
    return module(inputs if place.type == "meta" else inputs.to(place)).to(inputs.device)


def one_by_one(drawn: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Tokens [B] and their distributions [B, V], K times -> tokens [B, K], distributions [B, K, V]."""
    tokens, probabilities = zip(*drawn, strict=True)
    return torch.stack(tokens, dim=1), torch.stack(probabilities, dim=1)
