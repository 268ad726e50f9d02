"""EAGLE-3 (Li et al. 2025, arXiv:2503.01840), and its version 3.1.

The head reads a sequence of entries. Entry i pairs the target's features at token i with the embedding of token i + 1,
and predicts token i + 2. A drafted token has no features yet. In their place, the head uses the state that it computed
for its last entry. Suppose that the text is `a b c`, and that the target has read `a b`:

    entry 0   features of a, embedding of b
    entry 1   features of b, embedding of c       predicts d
    entry 2   state of entry 1, embedding of d    predicts e
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from harness.local.drafting.heads.head import Draft, Draw, HeadConfig, LayeredHead, Unread, stacked
from harness.local.drafting.heads.stored import StoredHead
from harness.local.models.cache_names import CACHE
from harness.local.runners.base import gather_rows
from harness.local.runners.compiled import end_part
from harness.local.runners.slots import SlotCache

_OPTIONS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


@dataclass(frozen=True, kw_only=True)
class EagleConfig(HeadConfig):
    """A configuration with the options of EAGLE-3, under their names in speculators' configurations.

    Attributes:
        norm_before_residual: whether the residual of the first layer is the normalised state; if not, it is the state
            before the norm.
        norm_before_fc: whether one norm is applied to the features of all layers together, before `fc` joins them.
        fc_norm: whether a separate norm is applied to the features of each layer, before `fc` joins them. We know of no
            head that has both `fc_norm` and `norm_before_fc`.
        norm_output: whether the next entry uses the state after the final norm; if not, the state before it.
    """

    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool


class Eagle3(LayeredHead):
    """EAGLE-3, in the formats of speculators, SafeAILab and DeepSpec. It drafts one token per pass.

    In the cache, the entries of drafted tokens come after the entries of decided tokens. The next proposal overwrites
    the entries of drafted tokens.
    """

    name = "eagle3"
    title = "EAGLE-3"
    config_type: ClassVar[type[HeadConfig]] = EagleConfig
    config: EagleConfig
    one_pass = False

    @classmethod
    def fields(cls, stored: StoredHead) -> dict[str, Any]:
        is_safeailab = not (stored.is_speculators or stored.is_deepspec)
        usually_stored = ["lm_head"] if is_safeailab else ["lm_head", "embed_tokens"]
        # SafeAILab's heads always have one layer, even if their configuration states another number.
        num_layers = 1 if is_safeailab else None
        fields = stored.layered(usually_stored, num_layers)
        return fields | {option: bool(stored.named.get(option)) for option in _OPTIONS}

    def __init__(self, config: EagleConfig) -> None:
        layer_config: Any = config.transformer
        super().__init__(config, style=layer_config.model_type)
        width = layer_config.hidden_size
        # The first layer reads an embedding and a state side by side.
        first: Any = self.layers[0]
        for name in ("q_proj", "k_proj", "v_proj"):
            plain = getattr(first.self_attn, name)
            wide = nn.Linear(2 * width, plain.out_features, bias=plain.bias is not None)
            setattr(first.self_attn, name, wide)
        first.hidden_norm = LlamaRMSNorm(width, layer_config.rms_norm_eps)
        self.input_norm: nn.Module | None = None
        self.fc_norm: nn.ModuleList | None = None
        if config.norm_before_fc:
            self.input_norm = LlamaRMSNorm(self.fc.in_features, layer_config.rms_norm_eps)
        if config.fc_norm:
            norms = [
                LlamaRMSNorm(config.target_size, layer_config.rms_norm_eps)
                for _ in config.target_layers
            ]
            self.fc_norm = nn.ModuleList(norms)

    def draft(self, unread: Unread, uniforms: Tensor, cache: SlotCache, draw: Draw) -> Draft:
        logits, states = self.predict(self.read(unread, cache))
        drawn = [draw(logits[:, 0], uniforms[:, 0])]
        # The entries of drafted tokens are written to the slots after those of the text.
        slots = unread.starts + unread.counts
        for numbers in uniforms[:, 1:].unbind(1):
            # The compiled part ends here, so that all passes share one compiled code.
            end_part()
            cache.place(slots, 1)
            states = self(self.embed(drawn[-1].tokens.unsqueeze(1)), states, cache)
            logits, states = self.predict(states)
            drawn.append(draw(logits[:, 0], numbers))
            slots = slots + 1
        return stacked(drawn)

    def read(self, unread: Unread, cache: SlotCache) -> Tensor:
        """Read the unread features. Returns the state [B, 1, width] of each row's last entry."""
        states = self.join(unread.features)
        cache.place(unread.starts, states.shape[1])
        states = self(self.embed(unread.following), states, cache)
        return gather_rows(states, unread.last().unsqueeze(1))

    def predict(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits [B, n, V of the head] of entries that have these states [B, n, width], and the states
        [B, n, width] that the next entries use.
        """
        normed = self.norm(states)
        return self.logits(normed), normed if self.config.norm_output else states

    def join(self, features: Tensor) -> Tensor:
        """Join the target's features [B, n, L * D] to states [B, n, width of the head]."""
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norm is not None:
            parts = features.chunk(len(self.fc_norm), dim=-1)
            normed = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
            features = torch.cat(normed, dim=-1)
        return self.fc(features)

    def forward(self, embedded: Tensor, states: Tensor, cache: SlotCache) -> Tensor:
        """Run the layers over entries, at the slots where `cache` has placed them. Returns the entries' states
        [B, n, width], before the final norm.

        Args:
            embedded: [B, n, width], the embedding of each entry's token.
            states: [B, n, width], each entry's joined features or, for a drafted token, the state of the entry before.
        """
        rotary = self.rotary_emb(states, cache.positions)
        for index, (layer, window) in enumerate(zip(self.layers, self.windows, strict=True)):
            attention_inputs = {
                "attention_mask": cache.causal_mask(window, states.dtype),
                "position_embeddings": rotary,
                CACHE: cache,
            }
            if index > 0:
                states = layer(states, **attention_inputs)
                continue
            first: Any = layer
            normed = first.hidden_norm(states)
            residual = normed if self.config.norm_before_residual else states
            joined = torch.cat([first.input_layernorm(embedded), normed], dim=-1)
            attended, *_ = first.self_attn(hidden_states=joined, **attention_inputs)
            residual = residual + attended
            states = residual + first.mlp(first.post_attention_layernorm(residual))
        return states
