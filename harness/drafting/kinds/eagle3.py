"""EAGLE-3 (Li et al. 2025, arXiv:2503.01840) and its version 3.1; `peagle` shares its weights' names.

Entry i of the head pairs the embedding of token i + 1 with the target's features at token i, and predicts token i + 2.
Beyond the decided tokens the chain takes its own last state in place of features; P-EAGLE takes trained masks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from harness.decoding.protocols import TreeDrafter
from harness.decoding.warp import AnyWarp
from harness.drafting.blocks import HeadConfig, LayeredHead
from harness.drafting.eagle_trees import EagleTrees
from harness.drafting.head_drafter import Draft, HeadDrafter, Unread, stacked
from harness.drafting.head_formats import Shapes, StoredHead
from harness.drafting.head_trees import HeadTrees, MarginalPredictor
from harness.drafting.new_layers import speculators_configuration
from harness.drafting.slot_cache import SlotCache
from harness.drafting.training_batch import DECAY, TrainingBatch
from harness.drafting.tree_growth import Predictor
from harness.drafting.tree_plan import TreePlan
from harness.menu.head_kind import HeadKind
from harness.runners.regions import end_part


@dataclass(frozen=True, kw_only=True)
class EagleConfig(HeadConfig):
    """An EAGLE-3 head; names as in speculators' configurations.

    Attributes:
        transformer: of its own layers.
        norm_before_residual: whether the first layer's residual is the normalised state.
        norm_before_fc: one norm over all features, or
        fc_norm: one for each layer's.
        norm_output: whether the chain goes on with normalised states.
        mask_token_id: of P-EAGLE; None for a chain.
    """

    transformer: PreTrainedConfig
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    mask_token_id: int | None = None


class EagleHead(LayeredHead):
    """The weights of an EAGLE-3 head."""

    def __init__(self, config: EagleConfig) -> None:
        transformer = config.transformer
        super().__init__(config, transformer, transformer.model_type)
        self.config = config
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
        if config.mask_token_id is not None:
            self.mask_hidden = nn.Parameter(torch.empty(1, 1, num_features))

    def join(self, features: Tensor) -> Tensor:
        """The target's features [B, n, L * D] -> states [B, n, width of the head]."""
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norm is not None:
            parts = features.chunk(len(self.fc_norm), dim=-1)
            normed = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
            features = torch.cat(normed, dim=-1)
        return self.fc(features)

    def forward(self, embedded: Tensor, states: Tensor, cache: SlotCache) -> Tensor:
        """Entries at `cache.positions` [B, n] -> their states [B, n, width], before the final norm."""
        rotary = self.rotary_emb(states, cache.positions)
        for index, (layer, window) in enumerate(zip(self.layers, self.windows, strict=True)):
            how = {
                "attention_mask": cache.causal_mask(window),
                "position_embeddings": rotary,
                "past_key_values": cache,
            }
            if index > 0:
                states = layer(states, **how)
                continue
            states = self._pass_first(layer, embedded, states, how)
        return states

    def _pass_first(
        self, layer: Any, embedded: Tensor, states: Tensor, how: Mapping[str, Any]
    ) -> Tensor:
        """Pass embeddings and states [B, n, width] through the first layer; `how` is for its attention."""
        normed = layer.hidden_norm(states)
        residual = normed if self.config.norm_before_residual else states
        joined = torch.cat([layer.input_layernorm(embedded), normed], dim=-1)
        attended, *_ = layer.self_attn(hidden_states=joined, **how)
        residual = residual + attended
        return residual + layer.mlp(layer.post_attention_layernorm(residual))

    def drafter(
        self, target: PreTrainedModel, warp: AnyWarp, confidence: float = 0.0
    ) -> EagleDrafter:
        return EagleDrafter(self, target, warp)

    def tree_drafter(self, target: PreTrainedModel, warp: AnyWarp, plan: TreePlan) -> TreeDrafter:
        is_chain = self.config.mask_token_id is None
        kind = EagleTreeDrafter if is_chain else MaskTreeDrafter
        return kind(self, target, warp, plan)

    def loss(self, batch: TrainingBatch, embedding: Any, output: Any, num_steps: int) -> Tensor:
        """Training-time test (section 3.2 of the paper): each step reads the states that the head itself made."""
        embedded = embedding(batch.tokens[:, 1:])
        states = self.join(batch.features()[:, :-1])
        num_rows, length = states.shape[:2]
        cache = _Unrolled(torch.arange(length, device=states.device).expand(num_rows, length))
        losses = []
        for step in range(num_steps):
            cache.step = step
            states = self(embedded, states, cache)
            normed = self.norm(states)
            loss = batch.loss(output(normed), 1, step, self.known_tokens)
            losses.append(loss * DECAY**step)
            following = normed if self.config.norm_output else states
            states = nn.functional.pad(following, (0, 0, 1, -1))
        return torch.stack(losses).sum()


class EagleDrafter(HeadDrafter):
    """Proposes with an EAGLE-3 head: as a chain, one token after the other, or with masks, all at once."""

    head: EagleHead

    def draft(self, unread: Unread, uniforms: Tensor) -> Draft:
        head = self.head
        if head.config.mask_token_id is not None:
            return self.draw(self.logits(unread, uniforms.shape[1]), uniforms)
        states = self.read(unread)
        most = uniforms.shape[1]
        ahead = torch.arange(most, device=states.device)
        slots = (unread.starts + unread.counts).unsqueeze(1) + ahead
        drawn: list[Draft] = []
        for slot, numbers in zip(slots.unbind(1), uniforms.unbind(1), strict=True):
            end_part()
            normed = head.norm(states)
            draft = self.draw(self._logits(normed[:, 0]), numbers)
            drawn.append(draft)
            if len(drawn) < most:
                self.cache.place(slot, 1)
                embedded = self._embed(draft.tokens.unsqueeze(1))
                following = normed if head.config.norm_output else states
                states = head(embedded, following, self.cache)
        return stacked(drawn)

    def logits(self, unread: Unread, count: int) -> Tensor:
        """Return logits [B, count, V of the head] from the last feature and masks behind it."""
        states = self.read(unread, num_masks=count - 1)
        return self._logits(self.head.norm(states))

    def read(self, unread: Unread, num_masks: int = 0) -> Tensor:
        """Read the new features, and masks behind them.

        Returns the states [B, 1 + masks, width] from the last feature on.
        """
        head = self.head
        _, last = unread.last()
        states = head.join(unread.features)
        tokens = unread.following
        if num_masks:
            index = torch.arange(states.shape[1] + num_masks, device=states.device)
            is_mask = index >= unread.counts.unsqueeze(1)
            mask_token = head.config.mask_token_id or 0
            tokens = nn.functional.pad(tokens, (0, num_masks)).masked_fill(is_mask, mask_token)
            states = nn.functional.pad(states, (0, 0, 0, num_masks))
            mask_state = head.join(head.mask_hidden)
            states = torch.where(is_mask.unsqueeze(-1), mask_state, states)
        self.cache.place(unread.starts, states.shape[1])
        states = head(self._embed(tokens), states, self.cache)
        wanted = last.unsqueeze(1) + torch.arange(1 + num_masks, device=states.device)
        return states.gather(1, wanted.unsqueeze(-1).expand(-1, -1, states.shape[-1]))


class EagleTreeDrafter(EagleTrees, EagleDrafter):
    """Proposes trees with an EAGLE-3 head that drafts a chain."""


class MaskTreeDrafter(HeadTrees, EagleDrafter):
    """Proposes trees with an EAGLE-3 head that has masks."""

    def predictor(self, unread: Unread, depth: int) -> Predictor:
        logits = self.logits(unread, depth)
        return MarginalPredictor(self.over_vocabulary(logits))


class _Unrolled(SlotCache):
    """Chains from every token at once: step s of the chain that began at entry i - s is at position i.

    A query sees the entries from the target's features up to where its chain began, then its chain.
    """

    def __init__(self, positions: Tensor) -> None:
        super().__init__()
        self.positions = positions  # [B, n], the same in every step
        self.step = 0

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if layer in self._layers:
            earlier_keys, earlier_values = self._layers[layer]
            keys = torch.cat([earlier_keys, keys], 2)
            values = torch.cat([earlier_values, values], 2)
        self._layers[layer] = keys, values
        return keys, values

    def range_mask(self, first: Tensor, last: Tensor) -> Tensor:
        ahead = last.unsqueeze(-1) - self.positions[:, None, :]  # [B, n, n], from key to query
        window = last.unsqueeze(-1) - first.unsqueeze(-1)
        seen_of_steps = [(ahead >= self.step) & (ahead <= window)]
        for step in range(1, self.step + 1):
            seen_of_steps.append(ahead == self.step - step)
        return torch.cat(seen_of_steps, dim=-1).unsqueeze(1)


class Eagle3(HeadKind):
    """EAGLE-3, as speculators, SafeAILab and DeepSpec store it."""

    name = "eagle3"
    one_pass = False
    drafts_trees = True
    trains = True

    def recognises(self, raw: Mapping[str, Any]) -> bool:
        if "speculators_model_type" in raw:
            has_masks = raw.get("mask_token_id") is not None
            return raw["speculators_model_type"] == "eagle3" and not has_masks
        if "dflash_config" in raw or ("target_layer_ids" in raw and "block_size" in raw):
            return False
        names = raw.get("architectures")
        named = isinstance(names, list) and any("eagle3" in str(name).lower() for name in names)
        return named or "draft_vocab_size" in raw

    def config(self, stored: StoredHead, shapes: Shapes | None) -> EagleConfig:
        return EagleConfig(**self.fields(stored, shapes))

    def fields(self, stored: StoredHead, shapes: Shapes | None) -> dict[str, Any]:
        """Fields of the configuration."""
        raw = stored.raw
        usually_stored = ["lm_head"]
        # DeepSpec's is the only one of flat formats to store an embedding.
        if "target_layer_ids" in raw or "transformer_layer_config" in raw:
            usually_stored.append("embed_tokens")
        fields = stored.layered(shapes, usually_stored)
        for flag in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
            fields[flag] = bool(raw.get(flag))
        return fields

    def build(self, config: EagleConfig) -> EagleHead:
        return EagleHead(config)

    def new(self, text: Any, verifier: str) -> tuple[dict[str, Any], Shapes]:
        """See `HeadKind.new`: one layer as wide as the target's."""
        raw, layers_read = speculators_configuration("eagle3", "llama", 1, text, verifier)
        raw |= {"architectures": ["Eagle3Speculator"], "norm_before_residual": True}
        raw["eagle_aux_hidden_state_layer_ids"] = layers_read
        return raw, {"lm_head.weight": (text.vocab_size, text.hidden_size)}


RECORD = Eagle3()
