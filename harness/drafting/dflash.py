"""DFlash (Chen et al. 2026) and DSpark: heads that draft a block of tokens in one pass.

Every layer sees the target's features at all decided tokens as keys and values. The queries are the token just decided
and masks after it, which see each other in both directions. DSpark then adds to each position's logits a bias that
depends on the token before it, so that its tokens are drawn one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from harness.decoding.protocols import Proposal
from harness.decoding.warp import AnyWarp
from harness.drafting.blocks import HeadConfig, HeadDrafter, LayeredHead, SlotCache, one_by_one


@dataclass(frozen=True, kw_only=True)
class BlockConfig(HeadConfig):
    """A DFlash or DSpark head.

    Attributes:
        transformer: of its own layers, always in Qwen3's style.
        block_size: queries of one pass, as in training.
        from_anchor: whether the query of the decided token predicts the next one (DSpark), or only the masks do.
        causal_windows: whether layers with a sliding window see the block in one direction only.
        markov_rank: of DSpark's bias; 0 without.
        confidence: whether there is a confidence head, and
        confidence_markov: whether it also reads the token before.
    """

    transformer: PreTrainedConfig
    block_size: int
    mask_token_id: int
    from_anchor: bool = False
    causal_windows: bool = False
    markov_rank: int = 0
    confidence: bool = False
    confidence_markov: bool = False

    @property
    def most_tokens(self) -> int:
        """That one pass can propose."""
        return self.block_size - (not self.from_anchor)


class BlockHead(LayeredHead):
    """The weights of a DFlash or DSpark head."""

    def __init__(self, config: BlockConfig) -> None:
        own, rank = config.transformer, config.markov_rank
        super().__init__(config, own, "qwen3")
        self.config = config
        self.hidden_norm = LlamaRMSNorm(own.hidden_size, own.rms_norm_eps)
        self.markov_head: nn.ModuleDict | None = None
        self.confidence_head: nn.ModuleDict | None = None
        if rank:
            previous = nn.Embedding(config.vocabulary_size, rank)
            following = nn.Linear(rank, config.draft_vocabulary_size, bias=False)
            self.markov_head = nn.ModuleDict({"markov_w1": previous, "markov_w2": following})
        if config.confidence:
            width = own.hidden_size + rank * config.confidence_markov
            self.confidence_head = nn.ModuleDict({"proj": nn.Linear(width, 1)})

    def read(self, features: Tensor, cache: SlotCache) -> None:
        """Write keys and values of the target's features [B, n, L * D] to `cache.positions`."""
        states = self.hidden_norm(self.fc(features))
        cosine, sine = self.rotary_emb(states, cache.positions)
        for index, layer in enumerate(self.layers):
            attention: Any = layer.self_attn
            shape = (*states.shape[:2], -1, attention.head_dim)
            keys = attention.k_norm(attention.k_proj(states).view(shape)).transpose(1, 2)
            keys, _ = apply_rotary_pos_emb(keys, keys, cosine, sine)
            cache.update(keys, attention.v_proj(states).view(shape).transpose(1, 2), index)

    def forward(self, states: Tensor, cache: SlotCache) -> Tensor:
        """Embedded queries of one block per row at `cache.positions` -> states [B, block, width], after the norm."""
        positions = cache.positions
        rotary, start, end = self.rotary_emb(states, positions), positions[:, :1], positions[:, -1:]
        for layer, window in zip(self.layers, self.windows, strict=True):
            first = (
                torch.zeros_like(positions)
                if window is None
                else (start - window).expand_as(positions)
            )
            causal = window is not None and self.config.causal_windows
            mask = cache.seen(first, positions if causal else end.expand_as(positions))
            states = layer(
                states, attention_mask=mask, position_embeddings=rotary, past_key_values=cache
            )
        return self.norm(states)

    def drafter(
        self, target: PreTrainedModel, warp: AnyWarp, confidence: float = 0.0
    ) -> BlockDrafter:
        """See `BlockDrafter`."""
        return BlockDrafter(self, target, warp, confidence)


class BlockDrafter(HeadDrafter):
    """Proposes with a DFlash or DSpark head, at most `BlockConfig.most_tokens` tokens.

    The block always has the size it was trained with: fewer masks would change what the others predict.

    Args:
        confidence: offer tokens only as far as the confidence head expects each to be accepted with at least this
            probability; 0 offers all.
    """

    def __init__(
        self, head: BlockHead, target: PreTrainedModel, warp: AnyWarp, confidence: float = 0.0
    ) -> None:
        super().__init__(head, target, warp)
        self._config, self._confidence = head.config, confidence

    def _draft(self, num_draft_tokens: int, uniforms: Tensor) -> Proposal:
        config, last = (
            self._config,
            self._following[self._ends()],
        )  # the token just decided, which has no features yet
        self._read()
        masks = last.new_full((len(last), config.block_size - 1), config.mask_token_id)
        queries = self._embed(torch.cat([last.unsqueeze(1), masks], dim=1))
        self._place(config.block_size)
        states = self._head(queries, self._cache)[:, config.block_size - config.most_tokens :][
            :, :num_draft_tokens
        ]
        logits, uniforms = self._logits(states), uniforms[:, : states.shape[1]]
        if self._head.markov_head is None:
            return self._offer(last, states, *self._draw(logits, uniforms))
        drawn: list[tuple[Tensor, Tensor]] = []
        for count in range(states.shape[1]):
            bias = self._head.markov_head["markov_w2"](
                self._previous(drawn[-1][0] if drawn else last)
            )
            drawn.append(
                self._draw(logits[:, count] + bias[..., : logits.shape[-1]], uniforms[:, count])
            )
        return self._offer(last, states, *one_by_one(drawn))

    def _read(self) -> None:
        self._place_new()
        self._head.read(self._features, self._cache)

    def _previous(self, tokens: Tensor) -> Tensor:
        assert self._head.markov_head is not None
        return self._head.markov_head["markov_w1"](tokens)

    def _offer(
        self, last: Tensor, states: Tensor, tokens: Tensor, probabilities: Tensor
    ) -> Proposal:
        """All tokens, or as many as the confidence head supports. It sees a token's predecessors, never the token."""
        if not self._confidence or self._head.confidence_head is None:
            return Proposal(tokens, probabilities)
        if self._config.confidence_markov:
            before = torch.cat([last.unsqueeze(1), tokens[:, :-1]], dim=1)
            states = torch.cat([states, self._previous(before)], dim=-1)
        expected = self._head.confidence_head["proj"](states).squeeze(-1).float().sigmoid()
        lengths = (expected >= self._confidence).long().cumprod(-1).sum(-1)
        return Proposal(tokens, probabilities, lengths.tolist())
