"""Configuration and weights that kinds of draft heads share.

A head is a few layers that were trained to continue from the target's own hidden states. Each kind
in `kinds/` inherits from `HeadConfig` and from `Head` or `LayeredHead`. The weights have the names
of the published formats, so a checkpoint loads without a table of names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from harness.local.decoding.warp import AnyWarp
from harness.local.drafting.heads.drafter import HeadDrafter

# The styles of layers that heads have, by transformers' name.
LAYER_STYLES: dict[str, type[nn.Module]] = {"llama": LlamaDecoderLayer, "qwen3": Qwen3DecoderLayer}

# Tables of which a pass reads one row per token, so that they do not count as weights it reads.
_LOOKED_UP = (
    "embed_tokens.weight",
    "markov_head.markov_w1.weight",
    "candidate_selector.predecessor_codebook",
    "candidate_selector.successor_codebook",
    "d2t",
)


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """The sizes and options of a head, whatever format it was stored in. Each kind adds its own.

    Attributes:
        layers: L layers of the target, whose hidden states the head reads: 0 is the embedding, i
            what comes out of layer i.
        target_size: D, the width of these hidden states.
        vocabulary_size: the width of the target's logits.
        draft_vocabulary_size: the width of the head's logits. If it is smaller, `Head.d2t` says
            which of the target's tokens they are for.
        own_embedding: whether the head has an embedding; otherwise it uses the target's.
        own_output: whether it has an output matrix; otherwise it uses the target's. A smaller
            vocabulary needs its own.
        transformer: the configuration of the head's own layers; None for Medusa, which has none.
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
    def borrowed_outputs(self) -> int:
        """How many numbers of the target's output matrix a pass reads."""
        return 0 if self.own_output else self.target_size * self.vocabulary_size

    def share_read(self, name: str) -> float:
        """Return which share of the head's own tensor of this name a pass of one token reads."""
        return 0.0 if name in _LOOKED_UP else 1.0


class Head(nn.Module):
    """A head's weights: here those that map tokens to states of `width` numbers and back.

    Attributes:
        drafter_class: what drafts with it.
        config: of the kind's own class.
        d2t: [V of the head], which of the target's tokens the head has; None if all. Its token i is
            the target's token i + d2t[i]: d2t = [0, 0, 3] maps the tokens 0, 1, 2 to 0, 1, 5.
    """

    drafter_class: ClassVar[type[HeadDrafter]]
    config: Any
    d2t: Tensor | None

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
        reduced = config.draft_vocabulary_size != config.vocabulary_size
        offsets = torch.zeros(config.draft_vocabulary_size, dtype=torch.long) if reduced else None
        self.register_buffer("d2t", offsets)

    @property
    def known_tokens(self) -> Tensor | None:
        """The target's token [V of the head] for each output of a head with a smaller vocabulary;
        None for a head that has all tokens.
        """
        if self.d2t is None:
            return None
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def drafter(
        self,
        target: PreTrainedModel,
        warp: AnyWarp,
        confidence: float = 0.0,
    ) -> HeadDrafter:
        """Return a drafter with these weights; arguments as of `HeadDrafter`."""
        return self.drafter_class(self, target, warp, confidence)

    def huggingface(self, target: PreTrainedModel) -> dict[str, Any]:
        """Return the arguments of transformers' `generate` that make it draft with these weights,
        where `HeadKind.check_huggingface` refuses nothing.
        """
        raise NotImplementedError


class LayeredHead(Head):
    """A head with transformer layers.

    Args:
        style: of the layers, a key of `LAYER_STYLES`.

    Attributes:
        fc: joins the target's features [..., L * D] to the width of the layers.
        windows: as of `sliding_windows`.
    """

    norm: nn.Module
    rotary_emb: nn.Module

    def __init__(self, config: HeadConfig, style: str) -> None:
        own: Any = config.transformer
        super().__init__(config, own.hidden_size)
        own._attn_implementation = "sdpa"
        self.fc = nn.Linear(len(config.layers) * config.target_size, own.hidden_size, bias=False)
        layer: Any = LAYER_STYLES[style]
        self.layers = nn.ModuleList(layer(own, index) for index in range(own.num_hidden_layers))
        self.norm = LlamaRMSNorm(own.hidden_size, own.rms_norm_eps)
        # Its buffers are in no checkpoint, so they need numbers although `HeadCheckpoint.build`
        # makes the module on the meta device.
        with torch.device("cpu"):
            self.rotary_emb = LlamaRotaryEmbedding(own)
        self.windows = sliding_windows(own)


def sliding_windows(transformer: PreTrainedConfig) -> list[int | None]:
    """Return the sliding window of each layer, in tokens; None for a layer without one."""
    num_layers = transformer.num_hidden_layers
    kinds = getattr(transformer, "layer_types", None) or ["full_attention"] * num_layers
    window = getattr(transformer, "sliding_window", None)
    return [window if kind.startswith("sliding") else None for kind in kinds]
