"""EAGLE-3 (Li et al. 2025, arXiv:2503.01840), its version 3.1, and P-EAGLE, which drafts all tokens in one pass.

Entry i of the head pairs the embedding of token i + 1 with the target's features at token i, and predicts token i + 2.
Beyond the decided tokens the chain takes its own last state in place of features; P-EAGLE takes trained masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from harness.decoding.protocols import Proposal, Step
from harness.decoding.transfer import to_device
from harness.decoding.warp import Warp
from harness.drafting.blocks import MOST_UNREAD, CachedDrafter, HeadConfig, LayeredHead, SlotCache, behind, stacked


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
        own, num_features = config.transformer, len(config.layers) * config.target_size
        super().__init__(config, own, own.model_type)
        self.config = config
        first: Any = self.layers[0]
        width, epsilon = own.hidden_size, own.rms_norm_eps
        for name in ("q_proj", "k_proj", "v_proj"):
            plain = getattr(first.self_attn, name)
            wide = nn.Linear(2 * width, plain.out_features, bias=plain.bias is not None)
            setattr(first.self_attn, name, wide)
        first.hidden_norm = LlamaRMSNorm(width, epsilon)
        self.input_norm = LlamaRMSNorm(num_features, epsilon) if config.norm_before_fc else None
        norms = (LlamaRMSNorm(config.target_size, epsilon) for _ in config.layers)
        self.fc_norm = nn.ModuleList(norms) if config.fc_norm else None
        if config.mask_token_id is not None:
            self.mask_hidden = nn.Parameter(torch.empty(1, 1, num_features))

    def join(self, features: Tensor) -> Tensor:
        """The target's features [B, n, L * D] -> states [B, n, width of the head]."""
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norm is not None:
            parts = features.chunk(len(self.fc_norm), dim=-1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(features)

    def forward(self, embedded: Tensor, states: Tensor, cache: SlotCache) -> Tensor:
        """Entries at `cache.positions` [B, n] -> their states [B, n, width], before the final norm."""
        rotary = self.rotary_emb(states, cache.positions)
        layer: Any
        for index, (layer, window) in enumerate(zip(self.layers, self.windows, strict=True)):
            how = {
                "attention_mask": cache.causal(window),
                "position_embeddings": rotary,
                "past_key_values": cache,
            }
            if index:
                states = layer(states, **how)
                continue
            normed = layer.hidden_norm(states)
            residual = normed if self.config.norm_before_residual else states
            joined = torch.cat([layer.input_layernorm(embedded), normed], dim=-1)
            residual = residual + layer.self_attn(hidden_states=joined, **how)[0]
            states = residual + layer.mlp(layer.post_attention_layernorm(residual))
        return states

    def drafter(self, target: PreTrainedModel, warp: Warp) -> EagleDrafter:
        """See `HeadDrafter`."""
        return EagleDrafter(self, target, warp)


class EagleDrafter(CachedDrafter):
    """Proposes with an EAGLE-3 head: as a chain, one token after the other, or with masks, all at once."""

    def __init__(self, head: EagleHead, target: PreTrainedModel, warp: Warp) -> None:
        super().__init__(head.config, head, target, warp)
        self._head = head
        self._following = torch.empty(0, dtype=torch.long)  # [B, n] the token after each of the features
        self._proposed = torch.empty(0, dtype=torch.long)  # [B, K]

    def start(self, prompts: Sequence[Sequence[int]], first_tokens: Sequence[int], step: Step) -> None:
        super().start(prompts, first_tokens, step)
        self._following = self._shifted(prompts, first_tokens)
        self._proposed = self._following[:, :0]

    def add(self, prompts: Sequence[Sequence[int]], first_tokens: Sequence[int], step: Step) -> None:
        super().add(prompts, first_tokens, step)
        self._following = stacked(self._following, self._shifted(prompts, first_tokens))
        self._proposed = self._following[:, :0]

    @torch.inference_mode()
    def propose(self, num_draft_tokens: int, uniforms: Tensor) -> Proposal:
        parallel = self._head.config.mask_token_id is not None
        tokens, probabilities = (self._all_at_once if parallel else self._chain)(num_draft_tokens, uniforms)
        self._proposed = tokens
        return Proposal(tokens, probabilities)

    @torch.inference_mode()
    def observe(self, num_accepted: Sequence[int], next_tokens: Sequence[int], step: Step) -> None:
        if max(self._new) > MOST_UNREAD:
            self._read(num_masks=0)
        device = self._features.device
        following = torch.cat(
            [self._proposed[:, : max(num_accepted)], self._proposed.new_zeros(len(next_tokens), 1)], 1
        )
        index = to_device(num_accepted, device).unsqueeze(1)
        following = following.scatter_(1, index, to_device(next_tokens, device).unsqueeze(1))
        self._following = behind(self._following, [0] * len(self._new), self._new, following)
        self._append(num_accepted, step)
        self._proposed = self._following[:, :0]

    def select(self, rows: Sequence[int]) -> None:
        super().select(rows)
        index = to_device(rows, self._following.device)
        self._following, self._proposed = self._following[index], self._proposed[index]

    def _shifted(self, prompts: Sequence[Sequence[int]], first_tokens: Sequence[int]) -> Tensor:
        """The token after each of the prompts' own [B, longest]."""
        following = [[*prompt[1:], first] for prompt, first in zip(prompts, first_tokens, strict=True)]
        width = max(map(len, following))
        padded = [tokens + [0] * (width - len(tokens)) for tokens in following]
        return torch.tensor(padded, device=self._features.device)

    def _chain(self, num_draft_tokens: int, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        states = self._read(num_masks=0)
        drawn: list[tuple[Tensor, Tensor]] = []
        for count in range(num_draft_tokens):
            normed = self._head.norm(states)
            drawn.append(self._draw(self._logits(normed[:, 0]), uniforms[:, count]))
            if count + 1 < num_draft_tokens:
                self._place([length + count for length in self._lengths], 1)
                last = normed if self._head.config.norm_output else states
                states = self._head(self._embed(drawn[-1][0].unsqueeze(1)), last, self._cache)
        tokens, probabilities = zip(*drawn, strict=True)
        return torch.stack(tokens, dim=1), torch.stack(probabilities, dim=1)

    def _all_at_once(self, num_draft_tokens: int, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        states = self._read(num_masks=num_draft_tokens - 1)
        return self._draw(self._logits(self._head.norm(states)), uniforms)

    def _read(self, num_masks: int) -> Tensor:
        """Read the new features and the masks after them -> the states [B, 1 + masks, width] from the last one on."""
        counts, device = to_device(self._new, self._features.device).unsqueeze(1), self._features.device
        states, tokens = self._head.join(self._features), self._following
        if num_masks:
            padding = (0, num_masks)
            index = torch.arange(states.shape[1] + num_masks, device=device)
            masked = index >= counts
            tokens = nn.functional.pad(tokens, padding).masked_fill(masked, self._head.config.mask_token_id or 0)
            states = nn.functional.pad(states, (0, 0, *padding))
            states = torch.where(masked.unsqueeze(-1), self._head.join(self._head.mask_hidden), states)
        self._place(self._lengths, states.shape[1])
        states = self._head(self._embed(tokens), states, self._cache)
        self._all_read()
        wanted = counts - 1 + torch.arange(1 + num_masks, device=device)
        return states.gather(1, wanted.unsqueeze(-1).expand(-1, -1, states.shape[-1]))
