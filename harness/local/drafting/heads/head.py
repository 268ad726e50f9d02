"""A draft head: a few layers that were trained to predict tokens from the target's hidden states.

Each kind of head is a subclass of `Head`. `fields` reads the published configuration, the constructor makes the
modules, and `draft` draws tokens. The modules have the names of the published formats, so that stored weights load
without a table of names.
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

# Tensors whose bytes planning does not count as read. Of an embedding, a pass reads only one row for each token. `d2t`
# has only one number for each of the head's tokens.
_LOOKED_UP = (
    "embed_tokens.weight",
    "markov_head.markov_w1.weight",
    "d2t",
)


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """The sizes and options of a head. A kind of head with further options has a subclass of this.

    Attributes:
        target_layers: the target's L hidden states that the head reads: 0 is the embedding, i the output of layer i.
            (The head's own layers are `LayeredHead.layers`.)
        target_size: D, the width of these hidden states.
        vocabulary_size: V, the width of the target's logits.
        draft_vocabulary_size: the width of the head's logits. If it is smaller than V, `Head.d2t` maps the head's
            tokens to the target's.
        own_embedding: whether the head has an embedding; if not, it uses the target's.
        own_output: whether the head has an output matrix; if not, it uses the target's.
        transformer: the configuration of the head's own transformer layers; None for Medusa, which has none.
    """

    target_layers: tuple[int, ...]
    target_size: int
    vocabulary_size: int
    draft_vocabulary_size: int
    own_embedding: bool = False
    own_output: bool = False
    transformer: PreTrainedConfig | None = None

    @property
    def most_tokens(self) -> int | None:
        """The largest number of tokens that the head can draft in an iteration; None without a limit."""
        return None


class Unread(NamedTuple):
    """Features that the head has not read yet: the target's hidden states at the tokens that the target has read since
    the last proposal. Each proposal begins by reading them.

    Suppose that the target had read `a b` of a row `a b c`. Then it read c and verified d, d was accepted, and e was
    decided after it. So `features` are those of c and d, `following` is d and e, `counts` is 2, and `starts` is 2, the
    index of c.

    Attributes:
        features: [B, n, L * D], the target's features. The first `counts` of each row are unread; the others are
            padding.
        following: [B, n], for each feature, the token after the one that the feature belongs to.
        counts: [B], the number of unread features of each row. 0 for a row that already rested in the last iteration
            and, when a batch begins, for a prompt of one token.
        starts: [B], the slot of the head's cache at which each row's first unread feature belongs.
    """

    features: Tensor
    following: Tensor
    counts: Tensor
    starts: Tensor

    def last(self) -> Tensor:
        """Return the index of each row's last unread feature, [B]; 0 for a row without unread features."""
        return (self.counts - 1).clamp(min=0)


class Draft(NamedTuple):
    """Tokens drawn by a head.

    Attributes:
        tokens: [B, K], ids of the target's vocabulary; [B] for a draft of one token.
        probabilities: [B, K, V], the distributions that the tokens were drawn from; [B, V] for a draft of one token.
    """

    tokens: Tensor
    probabilities: Tensor


# Draws tokens, given logits [B, ..., V of the head] and uniforms [B, ...].
Draw = Callable[[Tensor, Tensor], Draft]


def stacked(drawn: Sequence[Draft]) -> Draft:
    """Join K drafts of one token each (tokens [B]) into one draft of K tokens (tokens [B, K])."""
    # `zip` yields the K tensors of tokens, and then those of probabilities.
    return Draft(*(torch.stack(tensors, 1) for tensors in zip(*drawn, strict=True)))


class Head(nn.Module):
    """The base class of heads. It holds the embedding and the output matrix, which are the head's own or the target's.

    Args:
        width: the width of the head's states.

    Class attributes:
        name: the kind's name in speculators and vLLM.
        title: the kind's name in tables and documents.
        one_pass: whether one forward pass drafts all tokens.
        config_type: the class of `config`. The method `fields` returns the fields of this class.
        weight_files: the names of files that may hold the weights, in the order in which they are looked for.

    Attributes:
        d2t: [V of the head], which maps the head's tokens to the target's. Token i of the head is the target's token
            i + d2t[i]: d2t = [0, 0, 3] maps the tokens 0, 1, 2 to 0, 1, 5. None if the two vocabularies are the same.
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
        """Return the fields of `config_type`, read from a published configuration.

        Raises:
            SettingError: the head was made for another target, or uses an option that is not supported here. An
                implementation may raise any other exception too: `read_head` turns it into a SettingError saying that
                no head can be built from this config.json.
        """
        raise NotImplementedError

    def draft(self, unread: Unread, uniforms: Tensor, cache: SlotCache, draw: Draw) -> Draft:
        """Read the unread features, and draft up to K tokens with the random numbers `uniforms` [B, K], on the head's
        device.

        An implementation must not wait for the device. It may change only `cache`; entries of running rows must be
        within the first `cache.width` slots (which `HeadDrafter` sets before each call).

        Args:
            draw: draws tokens, given logits and uniforms.
        """
        raise NotImplementedError

    def read(self, unread: Unread, cache: SlotCache) -> Any:
        """Read the unread features into the cache, without drafting.

        This is called when a batch begins, with all features of each prompt but its last one: that of the last token is
        read by the first `draft`. It is not called if each prompt has only one token. A head without a cache does
        nothing. The caller ignores the result; only the `draft` of the same class may use it.
        """

    def num_written(self, num_unread: int, num_draft_tokens: int) -> int:
        """Return an upper bound on the number of cache slots that a proposal writes, counted from the slot of the first
        unread feature.
        """
        return num_unread + num_draft_tokens

    def borrow(self, target: PreTrainedModel) -> None:
        """Use the target's embedding and output matrix if the head lacks its own.

        A matrix on another device than the head is copied to the head's device. (If a target is on several GPUs, its
        embedding is on the first and its output matrix on the last.)
        """
        device = next(self.parameters()).device
        # Copies of parameters on the head's device, by the ids of the originals.
        moved: dict[int, Any] = {}
        modules: list[Any] = []
        for head_module, module in (
            (self.embed_tokens, target.get_input_embeddings()),
            (self.lm_head, target.get_output_embeddings()),
        ):
            weight: Any = module.weight
            if head_module is None and weight.device != device:
                for parameter in module.parameters():
                    copied = nn.Parameter(parameter.to(device), requires_grad=False)
                    # If the embedding and the output matrix are tied, only the first copy is kept, for both.
                    moved.setdefault(id(parameter), copied)
                # `deepcopy` takes the tensors in `moved` in place of the originals, whose copies would be on the
                # original device.
                module = remove_hook_from_module(copy.deepcopy(module, moved)).to(device)
            modules.append(head_module or module)
        # Modules in a tuple are not submodules of the head. So the target's modules are not saved or moved with it.
        self._matrices = tuple(modules)

    def embed(self, tokens: Tensor) -> Tensor:
        """Embed tokens with the head's own embedding or the target's."""
        return self._matrices[0](tokens)

    def logits(self, states: Tensor) -> Tensor:
        """Turn the head's states [..., width], after the final norm, into logits [..., V of the head]."""
        # The matrix may be padded: outputs beyond the vocabulary belong to no token.
        return self._matrices[1](states)[..., : self.config.draft_vocabulary_size]

    @property
    def num_outputs_borrowed(self) -> int:
        """How often one pass of the head reads the target's output matrix (Medusa: once for each of its heads)."""
        return 0 if self.config.own_output else 1

    def caches(self) -> list[LayerCache]:
        """Return the size of each layer's cache; an empty list for a head without a cache."""
        return []

    def sketches(self) -> list[TensorSketch]:
        """Return the sizes of the head's own tensors. The target's matrices are not included."""
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
        style: the style of the layers, a key of `LAYER_STYLES`.

    Attributes:
        fc: a matrix that projects the target's features [..., L * D] to the width of the layers.
        windows: the sliding window of each layer, as `sliding_windows` returns them.
    """

    norm: nn.Module
    rotary_emb: nn.Module

    def __init__(self, config: HeadConfig, style: str) -> None:
        layer_config: Any = config.transformer
        super().__init__(config, layer_config.hidden_size)
        layer_config._attn_implementation = "sdpa"
        self.fc = nn.Linear(
            len(config.target_layers) * config.target_size, layer_config.hidden_size, bias=False
        )
        layer: Any = LAYER_STYLES[style]
        self.layers = nn.ModuleList(
            layer(layer_config, index) for index in range(layer_config.num_hidden_layers)
        )
        self.norm = LlamaRMSNorm(layer_config.hidden_size, layer_config.rms_norm_eps)
        # The rotary embedding's buffers are not stored in checkpoints. They are computed here, on the CPU, because the
        # module may be built on the meta device, which computes no values.
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
