"""DFlash (Chen et al. 2026): a head that drafts a block of tokens in one pass.

A block is the token just decided, its anchor, and masks after it: these are the queries of a pass.
Every layer sees, as keys and values, the target's features at all decided tokens, and the other
queries of the block in both directions. Say the text ends with `a b`, and a block has four queries:

    features of ... a | b <mask> <mask> <mask>
                           c      d      e

Each mask predicts the token at its own place, without knowing the others. In DeepSpec's format and
in DSpark the anchor predicts too: then b predicts c, the first mask d, and so on (`from_anchor`).

A layer with a sliding window of w sees as many keys as in the code that trained it:

- speculators: the w tokens before the block, for all of its queries. These see each other up to
  their own place, unless `sliding_window_non_causal`.
- z-lab: w positions up to each query's own, and nothing after it, unless `is_causal` or
  `dflash_config.causal` say otherwise (then for all layers).

vLLM counts from each query in both formats. `jetspec`, `dspark` and `dflash2` add to this head.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import (
    MuseGlimmerAssistantConfig,
    MuseGlimmerAssistantModel,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from harness.config.settings import require
from harness.local.drafting.head_kind import FOR_HUGGINGFACE, HeadKind
from harness.local.drafting.heads.block_formats import ASSISTANT_NAMES, block_fields, stored_kind
from harness.local.drafting.heads.blocks import HeadConfig, LayeredHead, sliding_windows
from harness.local.drafting.heads.drafter import Draft, HeadDrafter, stacked
from harness.local.drafting.heads.formats import Shapes, StoredHead
from harness.local.drafting.heads.slot_cache import SlotCache
from harness.local.drafting.heads.unread import Unread
from harness.local.models.cache_names import CACHE


@dataclass(frozen=True, kw_only=True)
class BlockConfig(HeadConfig):
    """A DFlash head.

    Attributes:
        transformer: the configuration of its own layers, always in Qwen3's style.
        block_size: queries of one pass, as in training.
        mask_token_id: the token of a mask.
        from_anchor: whether the anchor predicts a token too, and not only the masks do.
        causal: whether a query sees only those of the block before it (JetSpec).
        causal_windows: the same in layers with a sliding window alone.
        windows_follow: whether a sliding window is counted from each query, as z-lab's and vLLM's
            code does, instead of from the anchor, as speculators trains.
    """

    transformer: PreTrainedConfig
    block_size: int
    mask_token_id: int
    from_anchor: bool = False
    causal: bool = False
    causal_windows: bool = False
    windows_follow: bool = False

    @property
    def most_tokens(self) -> int:
        """How many tokens one pass can propose."""
        return self.block_size if self.from_anchor else self.block_size - 1


class BlockDrafter(HeadDrafter):
    """Proposes with a DFlash head, at most `BlockConfig.most_tokens` tokens.

    The block always has the size it was trained with: fewer masks would change what the others
    predict.
    """

    head: BlockHead

    def draft(self, unread: Unread, uniforms: Tensor) -> Draft:
        anchor, states = self.block(unread, uniforms.shape[1])
        return self.draw_block(anchor, states, uniforms[:, : states.shape[1]])

    def block(self, unread: Unread, count: int) -> tuple[Tensor, Tensor]:
        """Read the features and pass one block.

        Returns the anchor [B], and the states [B, n, width] that predict the tokens after it: n is
        `count`, or the most that one pass can propose.
        """
        config = self.head.config
        # The token just decided has no features yet.
        anchor = unread.following[unread.last()]
        self.read(unread)
        masks = anchor.new_full((len(anchor), config.block_size - 1), config.mask_token_id)
        queries = self.embed(torch.cat([anchor.unsqueeze(1), masks], dim=1))
        self.cache.place(unread.starts + unread.counts, config.block_size)
        states = self.head(queries, self.cache)
        predicting = states[:, config.block_size - config.most_tokens :]
        return anchor, predicting[:, :count]

    def draw_block(self, anchor: Tensor, states: Tensor, uniforms: Tensor) -> Draft:
        """Draw K tokens after `anchor` [B] by their states [B, K, width] and uniforms [B, K]."""
        return self.draw(self._logits(states), uniforms)

    def num_ahead(self, num_draft_tokens: int) -> int:
        """A whole block, however few tokens are drafted."""
        return self.head.config.block_size

    def read(self, unread: Unread) -> None:
        self.cache.place(unread.starts, unread.features.shape[1])
        self.head.read(unread.features, self.cache)


class SequentialDrafter(BlockDrafter):
    """Draws the tokens of a block one after the other, without another pass (DSpark, DFlash 2).

    Each depends on the state at its place, and on the token before it.
    """

    @abstractmethod
    def logits_after(self, states: Tensor) -> Callable[[int, Tensor], Tensor]:
        """Return a function of a place in a block and of the tokens [B] before it, which returns the
        logits [B, V of the head] of the token at that place.

        Args:
            states: [B, K, width], of the K places.
        """

    def draw_block(self, anchor: Tensor, states: Tensor, uniforms: Tensor) -> Draft:
        logits_after = self.logits_after(states)
        drawn: list[Draft] = []
        before = anchor
        for place in range(states.shape[1]):
            logits = logits_after(place, before)
            drawn.append(self.draw(logits, uniforms[:, place]))
            before = drawn[-1].tokens
        return stacked(drawn)


class BlockHead(LayeredHead):
    """The weights of a DFlash head."""

    drafter_class: ClassVar[type[BlockDrafter]] = BlockDrafter

    def __init__(self, config: BlockConfig) -> None:
        transformer = config.transformer
        super().__init__(config, "qwen3")
        self.hidden_norm = LlamaRMSNorm(transformer.hidden_size, transformer.rms_norm_eps)

    def read(self, features: Tensor, cache: SlotCache) -> None:
        """Write keys and values of the target's features [B, n, L * D] to `cache`, where it has
        placed them.
        """
        states = self.hidden_norm(self.fc(features))
        cosine, sine = self.rotary_emb(states, cache.positions)
        for index, layer in enumerate(self.layers):
            attention: Any = layer.self_attn
            by_head = (*states.shape[:2], -1, attention.head_dim)
            plain_keys = attention.k_proj(states).view(by_head)
            values = attention.v_proj(states).view(by_head).transpose(1, 2)
            keys = attention.k_norm(plain_keys).transpose(1, 2)
            keys, _ = apply_rotary_pos_emb(keys, keys, cosine, sine)
            cache.update(keys, values, index)

    def forward(self, states: Tensor, cache: SlotCache) -> Tensor:
        """Pass embedded queries [B, block, width] of one block per row, at `cache.positions`.

        Returns their states [B, block, width], after the norm.
        """
        positions = cache.positions
        rotary = self.rotary_emb(states, positions)
        end = positions[:, -1:]
        for layer, window in zip(self.layers, self.windows, strict=True):
            has_causal_window = window is not None and self.config.causal_windows
            is_causal = self.config.causal or has_causal_window
            if window is None:
                first = torch.zeros_like(positions)
            elif self.config.windows_follow:
                first = positions - window + 1
            else:
                first = (positions[:, :1] - window).expand_as(positions)
            last = positions if is_causal else end.expand_as(positions)
            how = {
                "attention_mask": cache.range_mask(first, last),
                "position_embeddings": rotary,
                CACHE: cache,
            }
            states = self.pass_layer(layer, states, how)
        return self.norm(states)

    def huggingface(self, target: PreTrainedModel) -> dict[str, Any]:
        """Return the arguments with these weights in the only DFlash model that transformers has."""
        config = self.config
        own = config.transformer
        window = own.sliding_window
        fields = own.to_dict() | {
            # Of tokens at each side, where ours is of the tokens up to the query's own.
            "sliding_window": own.max_position_embeddings if window is None else window - 1,
            "block_size": config.block_size,
            "mask_token_id": config.mask_token_id,
            # Counted from the output of the first layer.
            "target_layer_ids": [layer - 1 for layer in config.layers],
        }
        del fields["model_type"]
        with torch.device("meta"):
            assistant = MuseGlimmerAssistantModel(MuseGlimmerAssistantConfig(**fields))
        # Its buffers are in no checkpoint.
        assistant.rotary_emb = type(assistant.rotary_emb)(assistant.config)
        state = {
            ASSISTANT_NAMES.get(name, name): value for name, value in self.state_dict().items()
        }
        assistant.load_state_dict(state, assign=True)
        assistant.rotary_emb.to(self.fc.weight.device)
        return {"assistant_model": assistant.eval(), "speculation_type": "dflash"}

    def pass_layer(self, layer: Any, states: Tensor, how: Mapping[str, Any]) -> Tensor:
        """Pass states [B, block, width] through a layer; `how` is for its attention."""
        return layer(states, **how)


class DFlash(HeadKind):
    """DFlash, as speculators, z-lab and DeepSpec store it."""

    name = "dflash"
    head_class: ClassVar[Any] = BlockHead

    def recognises(self, raw: Mapping[str, Any]) -> bool:
        return stored_kind(raw) == self.name

    def check_huggingface(self, config: BlockConfig, draft: str, num_draft_tokens: int) -> None:
        own = config.transformer
        has_windows = any(sliding_windows(own))
        is_like_theirs = not (
            type(config) is not BlockConfig
            or config.from_anchor
            or config.causal
            or config.own_embedding
            or config.own_output
            or own.attention_bias
            or (has_windows and (config.causal_windows or not config.windows_follow))
        )
        require(is_like_theirs, "draft", FOR_HUGGINGFACE, draft)
        most = config.most_tokens
        rule = f"must be at most {most} with engine=huggingface, a whole block of {draft}"
        require(num_draft_tokens <= most, "decoding.num_draft_tokens", rule, num_draft_tokens)

    def config(self, stored: StoredHead, shapes: Shapes | None) -> BlockConfig:
        fields = block_fields(stored, shapes, from_anchor=False, causal_windows=True)
        return BlockConfig(**fields)


RECORD = DFlash()
