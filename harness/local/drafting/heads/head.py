"""A draft head: a few layers that were trained to continue from the target's own hidden states.

A kind of head is one subclass: `fields` reads its published configuration, the constructor makes its
modules, `draft` draws tokens. The weights have the names of the published formats, so a checkpoint
loads without a table of names.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from accelerate.hooks import remove_hook_from_module
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

from harness.local.drafting.heads.stored import LAYER_STYLES, StoredHead
from harness.local.models.sketch import LayerCache, TensorSketch
from harness.local.runners.slots import SlotCache

# Tables from which a pass reads one row per token: they do not count as weights that it reads.
_LOOKED_UP = (
    "embed_tokens.weight",
    "markov_head.markov_w1.weight",
    "d2t",
)


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """The sizes and options of a head; a kind with further ones has a subclass.

    Attributes:
        layers: L layers of the target, whose hidden states the head reads: 0 is the embedding, i
            what comes out of layer i.
        target_size: D, the width of these hidden states.
        vocabulary_size: V, the width of the target's logits.
        draft_vocabulary_size: the width of the head's logits. If it is smaller, `Head.d2t` says
            which of the target's tokens they are for.
        own_embedding: whether the head has an embedding; otherwise it uses the target's.
        own_output: whether it has an output matrix; otherwise it uses the target's.
        transformer: the configuration of the head's own layers; None for Medusa, which has none.
    """

    layers: tuple[int, ...]
    target_size: int
    vocabulary_size: int
    draft_vocabulary_size: int
    own_embedding: bool = False
    own_output: bool = False
    transformer: PreTrainedConfig | None = None


class Unread(NamedTuple):
    """The features that a head has not read yet, of a batch: what a proposal begins with.

    Attributes:
        features: [B, n, L * D], of which the first `counts` of each row are unread.
        following: [B, n], the token after each.
        counts: [B]; 0 in rows that rest, and of a prompt of one token.
        starts: [B], the slots of the first ones in the head's cache.
    """

    features: Tensor
    following: Tensor
    counts: Tensor
    starts: Tensor

    def last(self) -> Tensor:
        """Return the index of each row's last unread feature, [B]."""
        return (self.counts - 1).clamp(min=0)


class Draft(NamedTuple):
    """Tokens drawn by a head.

    Attributes:
        tokens: [B, K], the target's.
        probabilities: [B, K, V], the distributions that they were drawn from.
    """

    tokens: Tensor
    probabilities: Tensor


# Draws tokens by logits [B, ..., V of the head] and uniforms [B, ...].
Draw = Callable[[Tensor, Tensor], Draft]


def stacked(drawn: Sequence[Draft]) -> Draft:
    """Stack K drafts of one token [B] each."""
    tokens = torch.stack([draft.tokens for draft in drawn], dim=1)
    return Draft(tokens, torch.stack([draft.probabilities for draft in drawn], dim=1))


class Head(nn.Module):
    """A head, here with what maps tokens to states of `width` numbers and back.

    Class attributes:
        name: of its kind, as speculators and vLLM call it.
        title: its name in tables and documents.
        one_pass: whether one forward pass drafts all tokens.
        config_type: of `config`, whose fields `fields` reads.
        weight_files: names of files with its weights, in the order in which they are looked for.

    Attributes:
        d2t: [V of the head], which of the target's tokens the head has; None if all. Its token i is
            the target's token i + d2t[i]: d2t = [0, 0, 3] maps the tokens 0, 1, 2 to 0, 1, 5.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    one_pass: bool = True
    config_type: ClassVar[type[HeadConfig]] = HeadConfig
    weight_files: ClassVar[tuple[str, ...]] = ("model.safetensors", "pytorch_model.bin")
    d2t: Tensor | None

    def __init__(self, config: HeadConfig, width: int) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens: nn.Module | None = None
        self.lm_head: nn.Module | None = None
        if config.own_embedding:
            self.embed_tokens = nn.Embedding(config.vocabulary_size, width)
        if config.own_output:
            self.lm_head = nn.Linear(width, config.draft_vocabulary_size, bias=False)
        reduced = config.draft_vocabulary_size != config.vocabulary_size
        offsets = torch.zeros(config.draft_vocabulary_size, dtype=torch.long) if reduced else None
        self.register_buffer("d2t", offsets)

    @classmethod
    def fields(cls, stored: StoredHead) -> dict[str, Any]:
        """Return the fields of its `config_type`, from a published configuration.

        Raises:
            SettingError: for another target, or a format that is not known completely. Any other
                exception is reported as a configuration from which no such head can be built.
        """
        raise NotImplementedError

    def draft(self, unread: Unread, uniforms: Tensor, cache: SlotCache, draw: Draw) -> Draft:
        """Read the features, and draft up to K tokens with uniforms [B, K], on the head's device.

        It never waits for the device, and changes nothing but the entries of `cache`. It may write and see the first
        `cache.width` slots.
        """
        raise NotImplementedError

    def read(self, unread: Unread, cache: SlotCache) -> Any:
        """Read the features into the cache without drafting: as a batch begins, those of the prompts, all but the last.
        A head without a cache has nothing to do. What it returns is for the kind's own `draft`.
        """

    def num_written(self, num_unread: int, num_draft_tokens: int) -> int:
        """Return how many slots of its cache a proposal may write, from the first unread feature on."""
        return num_unread + num_draft_tokens

    def borrow(self, target: PreTrainedModel) -> None:
        """Use the target's embedding and output matrix where the head has none.

        A matrix on another device is copied: a target on several GPUs has one on the first, the other
        on the last.
        """
        device = next(self.parameters()).device
        moved: dict[int, Any] = {}
        modules: list[Any] = []
        for head_module, module in (
            (self.embed_tokens, target.get_input_embeddings()),
            (self.lm_head, target.get_output_embeddings()),
        ):
            weight: Any = module.weight
            if head_module is None and weight.device != device:
                # Tied matrices become one copy.
                for parameter in module.parameters():
                    copied = nn.Parameter(parameter.to(device), requires_grad=False)
                    moved.setdefault(id(parameter), copied)
                module = remove_hook_from_module(copy.deepcopy(module, moved)).to(device)
            modules.append(head_module or module)
        # Modules in a tuple are no part of the head, which neither saves nor moves them.
        self._matrices = tuple(modules)

    def embed(self, tokens: Tensor) -> Tensor:
        """Embed tokens, by the head's matrix or the target's."""
        return self._matrices[0](tokens)

    def logits(self, states: Tensor) -> Tensor:
        """Turn states [..., D], after the final norm, into logits [..., V of the head]."""
        # Outputs beyond the vocabulary only pad the matrix.
        return self._matrices[1](states)[..., : self.config.draft_vocabulary_size]

    @property
    def num_outputs_borrowed(self) -> int:
        """How often a pass reads the target's output matrix."""
        return 0 if self.config.own_output else 1

    def caches(self) -> list[LayerCache]:
        """Return the sizes of the caches of its layers."""
        return []

    def sketches(self) -> list[TensorSketch]:
        """Return the sizes of its own tensors."""
        return [
            TensorSketch(
                count=tensor.numel(),
                itemsize=None if tensor.is_floating_point() else tensor.itemsize,
                read_per_token=0.0 if name in _LOOKED_UP else 1.0,
            )
            for name, tensor in self.state_dict().items()
        ]


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
        layer_config: Any = config.transformer
        super().__init__(config, layer_config.hidden_size)
        layer_config._attn_implementation = "sdpa"
        self.fc = nn.Linear(
            len(config.layers) * config.target_size, layer_config.hidden_size, bias=False
        )
        layer: Any = LAYER_STYLES[style]
        self.layers = nn.ModuleList(
            layer(layer_config, index) for index in range(layer_config.num_hidden_layers)
        )
        self.norm = LlamaRMSNorm(layer_config.hidden_size, layer_config.rms_norm_eps)
        # Its buffers are in no checkpoint, so they need numbers although the module may be built on
        # the meta device.
        with torch.device("cpu"):
            self.rotary_emb = LlamaRotaryEmbedding(layer_config)
        self.windows = sliding_windows(layer_config)

    def caches(self) -> list[LayerCache]:
        layer_config: Any = self.config.transformer
        numbers = 2 * layer_config.num_key_value_heads * layer_config.head_dim
        return [LayerCache(numbers, window=window) for window in self.windows]


def sliding_windows(transformer: PreTrainedConfig) -> list[int | None]:
    """Return the sliding window of each layer, in tokens; None for a layer without one."""
    num_layers = transformer.num_hidden_layers
    kinds = getattr(transformer, "layer_types", None) or ["full_attention"] * num_layers
    window = getattr(transformer, "sliding_window", None)
    return [window if kind.startswith("sliding") else None for kind in kinds]
