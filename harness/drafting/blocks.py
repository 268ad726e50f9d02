"""What the draft heads share: layers over a cache with one slot per position, and the target's vocabulary.

A head is a few layers that were trained to continue from the target's own hidden states. Its weights have the names of
the published formats, so a checkpoint loads without a table of names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from harness.decoding.protocols import Drafter, Step
from harness.decoding.randomness import existing_index
from harness.decoding.transfer import to_device
from harness.decoding.warp import Warp

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


class Head(nn.Module):
    """The part of a head's weights that maps tokens to states of `width` numbers and back."""

    d2t: Tensor | None

    def __init__(self, config: HeadConfig, width: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocabulary_size, width) if config.own_embedding else None
        self.lm_head = nn.Linear(width, config.draft_vocabulary_size, bias=False) if config.own_output else None
        # Added to a token of the head it gives the target's.
        reduced = config.draft_vocabulary_size != config.vocabulary_size
        offsets = torch.zeros(config.draft_vocabulary_size, dtype=torch.long) if reduced else None
        self.register_buffer("d2t", offsets)


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
    return [getattr(own, "sliding_window", None) if kind.startswith("sliding") else None for kind in kinds]


class SlotCache:
    """Keys and values of a head's layers: the entry at position p of a row is in slot p.

    Every query says which slots it sees. So entries that were made from rejected tokens need no removal: they are
    overwritten before their positions are seen.
    """

    def __init__(self) -> None:
        self._layers: dict[int, tuple[Tensor, ...]] = {}
        self.positions = torch.empty(0, dtype=torch.long)  # [B, n] of what `update` writes next
        self.num_slots = 0  # that queries may see

    def update(self, keys: Tensor, values: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
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
            layer: tuple(nn.functional.pad(one, padding) for one in held) for layer, held in self._layers.items()
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
        self._layers = {layer: tuple(one[rows] for one in held) for layer, held in self._layers.items()}


class HeadDrafter(Drafter):
    """What all drafters over heads do: read the target's hidden states, and draw from its vocabulary.

    Args:
        target: lends its embedding and its output matrix to a head without them.
        warp: the one applied to the target's logits.
    """

    def __init__(self, config: HeadConfig, head: Head, target: PreTrainedModel, warp: Warp) -> None:
        self.layers = config.layers
        self._warp = warp
        self._embedding: Any = head.embed_tokens or target.get_input_embeddings()
        self._output: Any = head.lm_head or target.get_output_embeddings()
        self._vocabulary_size = config.vocabulary_size
        self._tokens: Tensor | None = None  # of the target, for each output of the head
        if head.d2t is not None:
            self._tokens = head.d2t + torch.arange(len(head.d2t), device=head.d2t.device)

    def _embed(self, tokens: Tensor) -> Tensor:
        return self._embedding(tokens).to(tokens.device)

    def _logits(self, states: Tensor) -> Tensor:
        """States [..., D], after the final norm -> logits [..., V of the head]."""
        logits = self._output(states).to(states.device)
        return logits if self._tokens is not None else logits[..., : self._vocabulary_size]

    def _draw(self, logits: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [..., V of the head], uniforms [...] -> tokens of the target [...], probabilities [..., V]."""
        probabilities = self._warp(logits)
        drawn = existing_index(probabilities, uniforms.to(logits.device))
        if self._tokens is None:
            return drawn, probabilities
        spread = probabilities.new_zeros(*probabilities.shape[:-1], self._vocabulary_size)
        return self._tokens[drawn], spread.index_copy_(-1, self._tokens, probabilities)


class CachedDrafter(HeadDrafter):
    """A drafter whose head keeps a cache over the decided tokens; it reads what is new when it proposes."""

    def __init__(self, config: HeadConfig, head: Head, target: PreTrainedModel, warp: Warp) -> None:
        super().__init__(config, head, target, warp)
        self._cache = SlotCache()
        self._lengths: list[int] = []  # entries of each row in the cache
        self._new: list[int] = []  # of each row, among the features
        self._features = torch.empty(0)  # [B, n, L * D] of decided tokens that are not in the cache yet; left-aligned

    def start(self, prompts: Sequence[Sequence[int]], first_tokens: Sequence[int], step: Step) -> None:
        self._vocabulary_size = step.logits.shape[-1]
        self._cache = SlotCache()
        self._new = list(map(len, prompts))
        self._lengths = [0] * len(prompts)
        self._features = left_aligned(hidden_of(step), self._new).flatten(2)

    def add(self, prompts: Sequence[Sequence[int]], first_tokens: Sequence[int], step: Step) -> None:
        new = list(map(len, prompts))
        self._features = stacked(self._features, left_aligned(hidden_of(step), new).flatten(2))
        self._new, self._lengths = self._new + new, self._lengths + [0] * len(new)
        self._cache.add(len(new))

    def select(self, rows: Sequence[int]) -> None:
        index = to_device(rows, self._features.device)
        self._cache.select(index)
        self._features = self._features[index]
        self._lengths = [self._lengths[row] for row in rows]
        self._new = [self._new[row] for row in rows]

    def _append(self, num_accepted: Sequence[int], step: Step) -> None:
        """The hidden states of a verdict become features, behind those that no proposal has read yet."""
        counts, starts = [count + 1 for count in num_accepted], [0] * len(self._new)
        self._features = behind(self._features, starts, self._new, hidden_of(step)[:, : max(counts)].flatten(2))
        self._new = [unread + count for unread, count in zip(self._new, counts, strict=True)]

    def _place(self, starts: Sequence[int], count: int) -> None:
        """The cache writes next `count` entries per row from `starts` on."""
        device = self._features.device
        self._cache.positions = to_device(starts, device).unsqueeze(1) + torch.arange(count, device=device)
        self._cache.num_slots = max(starts) + count

    def _all_read(self) -> None:
        """The new features are in the cache."""
        self._lengths = [length + new for length, new in zip(self._lengths, self._new, strict=True)]
        self._new = [0] * len(self._new)


def hidden_of(step: Step) -> Tensor:
    """The hidden states that the target's runner was asked for."""
    assert step.hidden is not None, "the target's runner captures no hidden states"
    return step.hidden


def left_aligned(states: Tensor, lengths: Sequence[int]) -> Tensor:
    """Right-aligned states [B, width, ...] -> the first lengths[b] are row b's, copies of its last one follow."""
    num_rows, width = states.shape[:2]
    if min(lengths) == width:
        return states
    missing = to_device([width - length for length in lengths], states.device).unsqueeze(1)
    # What padded the row on the left may be no number at all, and must not reach the cache.
    sources = (torch.arange(width, device=states.device) + missing).clamp(max=width - 1)
    return states[torch.arange(num_rows, device=states.device).unsqueeze(1), sources]


def stacked(above: Tensor, below: Tensor) -> Tensor:
    """Some rows [B, n, ...] above others [C, m, ...], filled up with zeros on the right to the same width."""
    width = max(above.shape[1], below.shape[1])
    parts = [(part, part.new_zeros(len(part), width - part.shape[1], *part.shape[2:])) for part in (above, below)]
    return torch.cat([torch.cat(part, dim=1) for part in parts])


def behind(held: Tensor, starts: Sequence[int], counts: Sequence[int], new: Tensor) -> Tensor:
    """Of row b of `held` [B, n, ...] counts[b] from starts[b] on, then row b of `new` [B, m, ...], left-aligned."""
    if not max(counts):
        return new
    device, num_held = held.device, held.shape[1]
    index = torch.arange(max(counts) + new.shape[1], device=device)
    first, count = (to_device(numbers, device).unsqueeze(1) for numbers in (starts, counts))
    sources = index + torch.where(index < count, first, num_held - count)
    joined = torch.cat([held, new], dim=1)
    return joined[torch.arange(len(held), device=device).unsqueeze(1), sources.clamp(max=joined.shape[1] - 1)]
