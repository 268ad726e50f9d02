"""Configuration and weights that kinds of draft heads share.

A head is a few layers that were trained to continue from the target's own hidden states. Its weights have the names of
the published formats, so a checkpoint loads without a table of names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from harness.decoding.protocols import Drafter, TreeDrafter
from harness.decoding.warp import AnyWarp
from harness.drafting.training_batch import TrainingBatch
from harness.drafting.tree_plan import TreePlan

# The styles of layers that heads have, by transformers' name.
LAYER_STYLES: dict[str, type[nn.Module]] = {"llama": LlamaDecoderLayer, "qwen3": Qwen3DecoderLayer}


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
        transformer: of the head's own layers; None for Medusa, which has none.
        confidence: whether it estimates the chance that a token is accepted, as DSpark does.
    """

    layers: tuple[int, ...]
    target_size: int
    vocabulary_size: int
    draft_vocabulary_size: int
    own_embedding: bool = False
    own_output: bool = False
    transformer: PreTrainedConfig | None = None
    confidence: bool = False

    @property
    def cache_numbers_per_token(self) -> int:
        """Numbers in the keys and values of a token, over all of its layers."""
        own = self.transformer
        if own is None:
            return 0
        return 2 * own.num_hidden_layers * own.num_key_value_heads * own.head_dim

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
        # From draft tokens to the target's: draft token i is the target's token i + d2t[i], so that
        # d2t = [0, 0, 3] maps the draft tokens 0, 1, 2 to the target's 0, 1, 5.
        reduced = config.draft_vocabulary_size != config.vocabulary_size
        offsets = torch.zeros(config.draft_vocabulary_size, dtype=torch.long) if reduced else None
        self.register_buffer("d2t", offsets)

    @property
    def known_tokens(self) -> Tensor | None:
        """The target's tokens that a head of a smaller vocabulary can draft; None for all."""
        if self.d2t is None:
            return None
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def drafter(self, target: PreTrainedModel, warp: AnyWarp, confidence: float = 0.0) -> Drafter:
        """Drafts with these weights.

        Args:
            target: lends embedding and output matrix to heads without their own.
            warp: from logits to the distributions that tokens are drawn from.
            confidence: offer tokens only as far as a confidence head expects each to be accepted with at least this
                probability; 0 offers all.
        """
        raise NotImplementedError

    def tree_drafter(self, target: PreTrainedModel, warp: AnyWarp, plan: TreePlan) -> TreeDrafter:
        """Drafts trees with these weights, where `HeadKind.drafts_trees`; arguments as of `drafter`."""
        raise NotImplementedError

    def initialise(self) -> None:
        """Set weights that training does not begin with at random; all others are set before."""

    def loss(self, batch: TrainingBatch, embedding: Any, output: Any, num_steps: int) -> Tensor:
        """The loss of a batch.

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
