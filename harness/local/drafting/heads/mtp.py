"""Multi-token prediction (DeepSeek-AI 2024, arXiv:2412.19437): layers after the target's last one,
stored in its own checkpoint.

Entry i of the first layer pairs the target's last state at token i with the embedding of token i +
1, and predicts token i + 2. Entry i of the next layer pairs the state that came out of it with
token i + 2, and predicts token i + 3, and so on. With the text `a b c`, of which the target has
read `a b`, two layers draft the tokens d and e:

    layer 0, entry of b   state of the target at b, embedding of c    predicts d
    layer 1, entry of b   state of layer 0, embedding of d            predicts e

Where there is only one layer it drafts every token, as in other engines: a chain like EAGLE's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel

from harness.local.decoding.warp import AnyWarp
from harness.local.drafting.heads.blocks import LayeredHead, sliding_windows
from harness.local.drafting.heads.drafter import Draft, stacked
from harness.local.drafting.heads.slot_cache import SlotCache
from harness.local.drafting.heads.unread import Unread
from harness.local.drafting.kinds.eagle3 import EagleConfig, EagleDrafter, EagleHead
from harness.local.models.cache_names import CACHE


class MtpHead(EagleHead):
    """transformers' layers for multi-token prediction, in the place of an EAGLE head's.

    The embedding and the output matrix are the target's.

    In its configuration `layers` is the target's last one, and `transformer` is what
    `get_mtp_config()` of the target's configuration returns.
    """

    def __init__(self, config: EagleConfig, model: MtpModel) -> None:
        # As `Head` alone: its layers come from `model`.
        super(LayeredHead, self).__init__(config, config.target_size)
        self.layers = model.layers
        # Each layer ends with its own norm, or with a shared one.
        self.norm = nn.Identity()
        self.shared_norm = model.shared_post_norm if model.use_shared_post_norm else nn.Identity()
        rotary: Any = type(model.rotary_emb)
        self.rotary_emb = rotary(config.transformer)  # the target's may be on another device
        self.windows = sliding_windows(config.transformer)
        # The rotary embedding's further argument for each layer, where its angles differ by layer.
        self._rotary_of: list[dict[str, Any]] = [{}] * len(model.layers)
        if getattr(model, "has_per_layer_rope", False):
            self._rotary_of = [{"layer_type": kind} for kind in config.transformer.layer_types]

    def huggingface(self, target: PreTrainedModel) -> dict[str, Any]:
        """Return the arguments with these layers as `assistant_model`, where `generate` looks for
        none: it would read them again for every text.
        """
        with torch.device("meta"):
            model = MtpModel(target, len(self.layers))
        model.layers = self.layers
        if model.use_shared_post_norm:
            model.shared_post_norm = self.shared_norm
        return {"use_mtp": True, "assistant_model": model.eval()}

    def join(self, features: Tensor) -> Tensor:
        """Return the features as they are: the layers normalise them."""
        return features

    def forward(self, embedded: Tensor, states: Tensor, cache: SlotCache, layer: int = 0) -> Tensor:
        """Write entries of one layer to `cache`, where it has placed them -> their states,
        normalised.

        Args:
            embedded, states: [B, n, width], the two parts of each entry.
        """
        rotary = self.rotary_emb(states, cache.positions, **self._rotary_of[layer])
        is_seen = cache.causal_mask(self.windows[layer])
        # Some attention modules of transformers take no boolean masks.
        unseen = torch.finfo(states.dtype).min
        mask = torch.where(is_seen, 0.0, unseen).to(states.dtype)
        block = self.layers[layer]
        states = block(
            embedded,
            states,
            position_embeddings=rotary,
            attention_mask=mask,
            position_ids=cache.positions,
            **{CACHE: cache},
        )
        return self.shared_norm(states)

    def drafter(
        self,
        target: PreTrainedModel,
        warp: AnyWarp,
        confidence: float = 0.0,
    ) -> EagleDrafter:
        """Return a drafter; there is no setting for its confidence."""
        if len(self.layers) == 1:
            return EagleDrafter(self, target, warp)
        return MtpDrafter(self, target, warp)


class MtpDrafter(EagleDrafter):
    """Proposes a token from each of several layers.

    The last entries of deeper layers read tokens that were only drafted. All layers read these
    entries again when the tokens are decided (`num_reread`).
    """

    def __init__(self, head: MtpHead, target: PreTrainedModel, warp: AnyWarp) -> None:
        super().__init__(head, target, warp)
        self.num_reread = len(head.layers) - 1

    def draft(self, unread: Unread, uniforms: Tensor) -> Draft:
        return stacked(self._through_layers(unread, uniforms.unbind(1)))

    def read(self, unread: Unread) -> Tensor:
        self._through_layers(unread, ())
        return unread.features

    def _through_layers(self, unread: Unread, uniforms: Sequence[Tensor]) -> list[Draft]:
        """Read the new features in every layer, because each will need its keys and values of them.

        The first layers also draw a token each, with their own uniforms [B].
        """
        states = unread.features
        tokens = unread.following
        last = unread.last()
        drawn: list[Draft] = []
        self.cache.place(unread.starts, states.shape[1])
        for layer in range(len(self.head.layers)):
            states = self.head(self.embed(tokens), states, self.cache, layer)
            # The next layer pairs its entries with the tokens one further on.
            tokens = tokens.roll(-1, dims=1)
            if layer < len(uniforms):
                draft = self.draw(self._logits(states[last]), uniforms[layer])
                drawn.append(draft)
                tokens[last] = draft.tokens
        return drawn
