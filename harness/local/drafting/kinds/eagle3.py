"""EAGLE-3 (Li et al. 2025, arXiv:2503.01840) and its version 3.1; `peagle` adds masks to it.

Entry i of the head pairs the embedding of token i + 1 with the target's features at token i, and
predicts token i + 2. Beyond the decided tokens there are no features yet: there the head takes the
state that came out of its own last entry. Say the text is `a b c`, and the target has read `a b`:

    entry 0   features of a, embedding of b
    entry 1   features of b, embedding of c       predicts d
    entry 2   state of entry 1, embedding of d    predicts e
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from harness.local.drafting.head_kind import HeadKind
from harness.local.drafting.heads.block_formats import stored_kind
from harness.local.drafting.heads.blocks import HeadConfig, LayeredHead
from harness.local.drafting.heads.drafter import Draft, HeadDrafter, stacked
from harness.local.drafting.heads.formats import Shapes, StoredHead
from harness.local.drafting.heads.slot_cache import SlotCache
from harness.local.drafting.heads.unread import Unread
from harness.local.models.cache_names import CACHE
from harness.local.runners.regions import end_part


@dataclass(frozen=True, kw_only=True)
class EagleConfig(HeadConfig):
    """An EAGLE-3 head; names as in speculators' configurations.

    Attributes:
        transformer: the configuration of its own layers.
        norm_before_residual: whether the first layer's residual is the normalised state.
        norm_before_fc: whether one norm over all features comes before they are joined.
        fc_norm: whether the features of each layer have a norm of their own there. No head that we
            know has both.
        norm_output: whether the next entry takes the normalised state.
    """

    transformer: PreTrainedConfig
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False


class EagleDrafter(HeadDrafter):
    """Proposes with an EAGLE-3 head, one token after the other.

    Entries of drafted tokens follow the decided ones in the head's cache, and are overwritten later.
    """

    head: EagleHead

    def draft(self, unread: Unread, uniforms: Tensor) -> Draft:
        states = self.read(unread)
        most = uniforms.shape[1]
        ahead = torch.arange(most, device=states.device)
        # Drafted tokens take the slots behind the text.
        slots = (unread.starts + unread.counts).unsqueeze(1) + ahead
        drawn: list[Draft] = []
        for slot, numbers in zip(slots.unbind(1), uniforms.unbind(1), strict=True):
            end_part()  # equal steps share their compiled code
            logits, following = self.predict(states)
            draft = self.draw(logits[:, 0], numbers)
            drawn.append(draft)
            if len(drawn) < most:
                self.cache.place(slot, 1)
                embedded = self.embed(draft.tokens.unsqueeze(1))
                states = self.head(embedded, following, self.cache)
        return stacked(drawn)

    def read(self, unread: Unread) -> Tensor:
        """Read the new features -> the state [B, 1, width] of each row's last one."""
        states = self.head.join(unread.features)
        self.cache.place(unread.starts, states.shape[1])
        states = self.head(self.embed(unread.following), states, self.cache)
        return states[unread.last()].unsqueeze(1)

    def predict(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits [B, n, V of the head] after entries with these states [B, n, width], and
        the states that the entries after them take.
        """
        normed = self.head.norm(states)
        return self._logits(normed), normed if self.head.config.norm_output else states


class EagleHead(LayeredHead):
    """The weights of an EAGLE-3 head."""

    drafter_class: ClassVar[type[EagleDrafter]] = EagleDrafter

    def __init__(self, config: EagleConfig) -> None:
        transformer = config.transformer
        super().__init__(config, transformer.model_type)
        width = transformer.hidden_size
        epsilon = transformer.rms_norm_eps
        # The first layer reads an embedding and a state side by side.
        first: Any = self.layers[0]
        for name in ("q_proj", "k_proj", "v_proj"):
            plain = getattr(first.self_attn, name)
            wide = nn.Linear(2 * width, plain.out_features, bias=plain.bias is not None)
            setattr(first.self_attn, name, wide)
        first.hidden_norm = LlamaRMSNorm(width, epsilon)

        num_features = len(config.layers) * config.target_size
        self.input_norm: nn.Module | None = None
        self.fc_norm: nn.ModuleList | None = None
        if config.norm_before_fc:
            self.input_norm = LlamaRMSNorm(num_features, epsilon)
        if config.fc_norm:
            norms = [LlamaRMSNorm(config.target_size, epsilon) for _ in config.layers]
            self.fc_norm = nn.ModuleList(norms)

    def join(self, features: Tensor) -> Tensor:
        """Join the target's features [B, n, L * D] -> states [B, n, width of the head]."""
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norm is not None:
            parts = features.chunk(len(self.fc_norm), dim=-1)
            normed = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
            features = torch.cat(normed, dim=-1)
        return self.fc(features)

    def forward(self, embedded: Tensor, states: Tensor, cache: SlotCache) -> Tensor:
        """Write entries to `cache`, where it has placed them -> their states, before the final
        norm.

        Args:
            embedded, states: [B, n, width], the two parts of each entry.
        """
        rotary = self.rotary_emb(states, cache.positions)
        for index, (layer, window) in enumerate(zip(self.layers, self.windows, strict=True)):
            how = {
                "attention_mask": cache.causal_mask(window),
                "position_embeddings": rotary,
                CACHE: cache,
            }
            if index > 0:
                states = layer(states, **how)
                continue
            first: Any = layer
            normed = first.hidden_norm(states)
            residual = normed if self.config.norm_before_residual else states
            joined = torch.cat([first.input_layernorm(embedded), normed], dim=-1)
            attended, *_ = first.self_attn(hidden_states=joined, **how)
            residual = residual + attended
            states = residual + first.mlp(first.post_attention_layernorm(residual))
        return states


class Eagle3(HeadKind):
    """EAGLE-3, as speculators, SafeAILab and DeepSpec store it."""

    name = "eagle3"
    head_class: ClassVar[Any] = EagleHead
    one_pass = False

    def recognises(self, raw: Mapping[str, Any]) -> bool:
        kind = stored_kind(raw)
        if kind is not None:
            has_masks = raw.get("mask_token_id") is not None
            return kind == self.name and not has_masks
        names = raw.get("architectures")
        named = isinstance(names, list) and any("eagle3" in str(name).lower() for name in names)
        return named or "draft_vocab_size" in raw

    def config(self, stored: StoredHead, shapes: Shapes | None) -> EagleConfig:
        return EagleConfig(**self.fields(stored, shapes))

    def fields(self, stored: StoredHead, shapes: Shapes | None) -> dict[str, Any]:
        """Return the fields of an `EagleConfig`."""
        raw = stored.raw
        usually_stored = ["lm_head"]
        # SafeAILab's format stores no embedding.
        is_of_deepspec = "target_layer_ids" in raw
        is_of_speculators = "transformer_layer_config" in raw
        if is_of_deepspec or is_of_speculators:
            usually_stored.append("embed_tokens")
        fields = stored.layered(shapes, usually_stored)
        if len(usually_stored) == 1 and shapes is None:
            # SafeAILab's format has one layer, whatever number its configuration states.
            fields["transformer"].num_hidden_layers = 1
        for flag in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
            fields[flag] = bool(raw.get(flag))
        return fields


RECORD = Eagle3()
