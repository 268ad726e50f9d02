"""Multi-token prediction (DeepSeek-AI 2024, arXiv:2412.19437): layers behind the target's last, in its own checkpoint.

Entry i of the first layer pairs the target's last state at token i with the embedding of token i + 1, and predicts
token i + 2. Entry i of the next layer pairs the state that came out of it with token i + 2, and so on. Where there is
only one layer it drafts every token, as in other engines: a chain like EAGLE's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel

from harness.decoding.protocols import Step
from harness.decoding.transfer import to_device
from harness.decoding.warp import Warp
from harness.drafting.blocks import MOST_UNREAD, LayeredHead, SlotCache, behind, windows
from harness.drafting.eagle import EagleConfig, EagleDrafter, EagleHead


@dataclass(frozen=True, kw_only=True)
class MtpConfig(EagleConfig):
    """MTP layers; `layers` is the target's last, and `transformer` is transformers' `get_mtp_config()` of it."""

    @property
    def most_tokens(self) -> int | None:
        """That can be proposed; None for any number."""
        number = self.transformer.num_hidden_layers
        return number if number > 1 else None


class MtpHead(EagleHead):
    """transformers' own layers in an EAGLE head's place; embedding and output matrix are the target's."""

    def __init__(self, config: MtpConfig, model: MtpModel) -> None:
        super(LayeredHead, self).__init__(config, config.target_size)
        self.config: MtpConfig = config
        # Each layer ends with its own norm, or with a shared one.
        self.layers, self.norm = model.layers, nn.Identity()
        self.shared_norm = model.shared_post_norm if model.use_shared_post_norm else nn.Identity()
        rotary: Any = type(model.rotary_emb)
        self.rotary_emb = rotary(config.transformer)  # the target's may be on another device
        self.windows = windows(config.transformer)
        kinds = config.transformer.layer_types if getattr(model, "has_per_layer_rope", False) else ()
        self._rotary_of = [{"layer_type": kind} for kind in kinds] or [{}] * len(model.layers)

    def join(self, features: Tensor) -> Tensor:
        """As they are: the layers normalise them."""
        return features

    def forward(self, embedded: Tensor, states: Tensor, cache: SlotCache, layer: int = 0) -> Tensor:
        """Entries of one layer at `cache.positions` [B, n] -> their states [B, n, width], normalised."""
        seen, block = cache.causal(self.windows[layer]), self.layers[layer]
        states = block(
            embedded,
            states,
            position_embeddings=self.rotary_emb(states, cache.positions, **self._rotary_of[layer]),
            # Not every attention of transformers takes booleans.
            attention_mask=torch.where(seen, 0.0, torch.finfo(states.dtype).min).to(states.dtype),
            position_ids=cache.positions,
            past_key_values=cache,
        )
        return self.shared_norm(states)

    def drafter(self, target: PreTrainedModel, warp: Warp) -> EagleDrafter:
        """See `HeadDrafter`."""
        return (EagleDrafter if self.config.most_tokens is None else MtpDrafter)(self, target, warp)


class MtpDrafter(EagleDrafter):
    """Proposes a token from each of several layers.

    Deeper layers read drafted tokens, so that their last entries are provisional. All layers read these again when the
    tokens are decided.
    """

    def __init__(self, head: MtpHead, target: PreTrainedModel, warp: Warp) -> None:
        super().__init__(head, target, warp)
        self._depth = len(head.layers)
        self._counts: list[int] = []  # of features that were read last, of each row

    @torch.inference_mode()
    def observe(self, num_accepted: Sequence[int], next_tokens: Sequence[int], step: Step) -> None:
        if 0 < max(self._new) <= MOST_UNREAD:
            super().observe(num_accepted, next_tokens, step)
            return
        if max(self._new):
            self._through_layers(0, torch.empty(0))
        features, following = self._features, self._following
        super().observe(num_accepted, next_tokens, step)
        kept = [min(self._depth - 1, count) for count in self._counts]
        starts = [count - keep for count, keep in zip(self._counts, kept, strict=True)]
        self._features = behind(features, starts, kept, self._features)
        self._following = behind(following, starts, kept, self._following)
        self._lengths = [length - keep for length, keep in zip(self._lengths, kept, strict=True)]
        self._new = [new + keep for new, keep in zip(self._new, kept, strict=True)]

    def _chain(self, num_draft_tokens: int, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        drawn = self._through_layers(min(num_draft_tokens, self._depth), uniforms)
        tokens, probabilities = zip(*drawn, strict=True)
        return torch.stack(tokens, dim=1), torch.stack(probabilities, dim=1)

    def _through_layers(self, num_draft_tokens: int, uniforms: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Read the new features in every layer, which later needs its own keys and values, and draw from the first."""
        states, tokens, drawn = self._features, self._following, []
        rows, last = torch.arange(len(states), device=states.device), to_device(self._new, states.device) - 1
        self._place(self._lengths, states.shape[1])
        for layer in range(self._depth):
            states = self._head(self._embed(tokens), states, self._cache, layer)
            tokens = tokens.roll(-1, dims=1)
            if layer < num_draft_tokens:
                drawn.append(self._draw(self._logits(states[rows, last]), uniforms[:, layer]))
                tokens[rows, last] = drawn[-1][0]
        self._counts = self._new
        self._all_read()
        return drawn
