"""DFlash (Chen et al. 2026): a head that drafts a block of tokens in one pass. DSpark is DFlash with a Markov head.

A block consists of the token that was decided last, called the *anchor*, and of mask tokens after it. One pass reads
the tokens of a block as its queries. In every layer, a query attends to the target's features at all tokens before the
anchor and to all queries of the block, including those after it. Suppose that the text ends with `a b`, and that a
block has four queries:

    features of ... a | b <mask> <mask> <mask>
                           c      d      e

Each mask predicts the token at its own index, without knowing the tokens drawn at the other masks. In DeepSpec's format
and in DSpark the anchor predicts a token too (`from_anchor`): then b predicts c, the first mask predicts d, and so on.

DSpark's Markov head needs no further pass. It adds a bias to the logits of each token. The bias depends on the token
drawn before it.

In a layer with a sliding window of w tokens, a query attends to the keys that it could attend to when the head was
trained. This depends on the training code:

- speculators: all queries of a block see the w tokens before the block. A query also sees the queries up to its own
  position, or all queries with `sliding_window_non_causal`.
- z-lab: each query sees w positions up to and including its own, and nothing after it. But if `is_causal` or
  `dflash_config.causal` is set, this setting decides for all layers whether a query sees later queries.

vLLM counts windows from each query in both formats.

                          speculators                  z-lab                      DeepSpec
    recognised by         `speculators_model_type`     `dflash_config`            neither of them
    first token drafted   by a mask (DSpark: anchor)   by a mask (DSpark: anchor) by the anchor
    sliding window from   the anchor                   each query                 there is none
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from harness.local.drafting.heads.head import Draft, Draw, HeadConfig, LayeredHead, Unread, stacked
from harness.local.drafting.heads.stored import StoredHead
from harness.local.models.cache_names import CACHE
from harness.local.runners.base import gather_rows
from harness.local.runners.slots import SlotCache


@dataclass(frozen=True, kw_only=True)
class DFlashConfig(HeadConfig):
    """A configuration with the options of DFlash.

    Attributes:
        block_size: the number of queries in a block; the same as in training.
        mask_token_id: the id of the mask token.
        from_anchor: whether the anchor predicts a token, as the masks do.
        causal: whether a query sees only itself and the queries before it, in all layers.
        causal_windows: the same, but only in the layers with a sliding window; `causal` overrides it.
        windows_follow: whether a sliding window is counted from each query. If not, it is counted from the anchor.
        markov_rank: the width of the Markov head's embeddings; 0 without a Markov head.
    """

    block_size: int
    mask_token_id: int
    from_anchor: bool
    causal: bool
    causal_windows: bool
    windows_follow: bool
    markov_rank: int = 0

    @property
    def most_tokens(self) -> int:
        """The largest number of tokens that one pass can draft."""
        return self.block_size - (not self.from_anchor)


class DFlash(LayeredHead):
    """DFlash and DSpark, in the formats of speculators, z-lab and DeepSpec. (SpecForge uses z-lab's format.) Their
    layers are always Qwen3 layers.

    A block always has the size that it had in training, even if fewer tokens are wanted: with fewer masks, the
    remaining masks would predict different tokens.
    """

    name = "dflash"
    title = "DFlash"
    config_type: ClassVar[type[HeadConfig]] = DFlashConfig
    config: DFlashConfig

    @classmethod
    def fields(cls, stored: StoredHead) -> dict[str, Any]:
        """Return the fields of the configuration. The table at the top of this file shows how the formats differ."""
        named = stored.named
        is_z_lab = "dflash_config" in stored.raw
        # DeepSpec stores copies of the target's matrices.
        fields = stored.layered(["embed_tokens", "lm_head"] if stored.is_deepspec else [])
        layer_config = fields["transformer"]
        kinds = getattr(layer_config, "layer_types", None) or ()
        if any("sliding" in kind for kind in kinds) and layer_config.sliding_window is None:
            # transformers drops `sliding_window` from a Qwen3 configuration that does not set `use_sliding_window`.
            # MiMo's heads repeat the window as `swa_window_size`.
            layer_config.sliding_window = named.get("swa_window_size")
        # z-lab's setting. If it is None, queries see no later queries in layers with a sliding window, and all queries
        # in other layers.
        causal = named.get("is_causal", named.get("causal"))
        causal_windows = stored.is_speculators and not named.get("sliding_window_non_causal")
        is_dspark = stored.kind == "dspark"
        # Only a DSpark head has a Markov head. In speculators' format its width is 256 unless stated.
        markov_rank = 0
        if is_dspark:
            markov_rank = named.get("markov_rank", 256 if stored.is_speculators else 0)
        markov_type = named.get("markov_head_type", "vanilla")
        if markov_rank and markov_type != "vanilla":
            raise stored.refused(f"has a Markov head of type {markov_type}; vanilla is supported")
        return fields | {
            "block_size": stored.required("block_size"),
            "mask_token_id": stored.required("mask_token_id"),
            "from_anchor": named.get("sample_from_anchor", is_dspark or stored.is_deepspec),
            "causal": is_z_lab and bool(causal),
            "causal_windows": causal is None if is_z_lab else causal_windows,
            "windows_follow": is_z_lab,
            "markov_rank": markov_rank,
        }

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__(config, "qwen3")
        layer_config: Any = config.transformer
        self.hidden_norm = LlamaRMSNorm(layer_config.hidden_size, layer_config.rms_norm_eps)
        self.markov_head: nn.ModuleDict | None = None
        if config.markov_rank:
            previous = nn.Embedding(config.vocabulary_size, config.markov_rank)
            following = nn.Linear(config.markov_rank, config.draft_vocabulary_size, bias=False)
            self.markov_head = nn.ModuleDict({"markov_w1": previous, "markov_w2": following})

    def draft(self, unread: Unread, uniforms: Tensor, cache: SlotCache, draw: Draw) -> Draft:
        size = self.config.block_size
        most = self.config.most_tokens
        # The anchor is the token after the last one with features.
        anchor = gather_rows(unread.following, unread.last())
        self.read(unread, cache)
        masks = anchor.new_full((len(anchor), size - 1), self.config.mask_token_id)
        queries = self.embed(torch.cat([anchor.unsqueeze(1), masks], dim=1))
        cache.place(unread.starts + unread.counts, size)
        count = min(uniforms.shape[1], most)
        # Leave out the anchor's state, unless the anchor predicts a token: then `most` is the size of the block.
        states = self(queries, cache)[:, size - most :][:, :count]
        logits, uniforms = self.logits(states), uniforms[:, :count]
        if self.markov_head is None:
            return draw(logits, uniforms)
        drawn: list[Draft] = []
        before = anchor
        for index, numbers in enumerate(uniforms.unbind(1)):
            bias = self.markov_head["markov_w2"](self.markov_head["markov_w1"](before))
            drawn.append(draw(logits[:, index] + bias, numbers))
            # Like the anchor, these are ids of the target's vocabulary.
            before = drawn[-1].tokens
        return stacked(drawn)

    def num_written(self, num_unread: int, num_draft_tokens: int) -> int:
        """Return the number of unread features plus a whole block, which is written even if few tokens are drafted."""
        return num_unread + self.config.block_size

    def read(self, unread: Unread, cache: SlotCache) -> None:
        """Write the keys and values of the target's unread features to `cache`.

        Features are only keys and values, never queries, so no layer is run on them.
        """
        cache.place(unread.starts, unread.features.shape[1])
        states = self.hidden_norm(self.fc(unread.features))
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
        """Run the layers over one block of queries per row. The queries are at the positions `cache.positions`.

        Args:
            states: [B, block, width], the embedded queries.

        Returns:
            The queries' states [B, block, width], after the final norm.
        """
        config = self.config
        positions = cache.positions
        rotary = self.rotary_emb(states, positions)
        for layer, window in zip(self.layers, self.windows, strict=True):
            # `first` and `last` are the slots that each query sees, as the module's docstring explains.
            if window is None:
                first = torch.zeros_like(positions)
            elif config.windows_follow:
                first = positions - window + 1
            else:
                first = (positions[:, :1] - window).expand_as(positions)
            is_causal = config.causal or (window is not None and config.causal_windows)
            last = positions if is_causal else positions[:, -1:].expand_as(positions)
            attention_inputs = {
                "attention_mask": cache.range_mask(first, last),
                "position_embeddings": rotary,
                CACHE: cache,
            }
            states = layer(states, **attention_inputs)
        return self.norm(states)
