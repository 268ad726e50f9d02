"""P-EAGLE: an EAGLE-3 head that drafts all tokens in one pass, from trained masks.

Where EAGLE-3 takes a token that it drew, and the state before it, P-EAGLE takes a mask token and a
trained state that stands for the features. Its tokens are drawn without knowing each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from harness.local.drafting.heads.drafter import Draft
from harness.local.drafting.heads.formats import Shapes, StoredHead
from harness.local.drafting.heads.unread import Unread
from harness.local.drafting.kinds.eagle3 import Eagle3, EagleConfig, EagleDrafter, EagleHead


@dataclass(frozen=True, kw_only=True)
class MaskConfig(EagleConfig):
    """A P-EAGLE head.

    Attributes:
        mask_token_id: the token in place of those not drawn yet.
    """

    mask_token_id: int


class MaskDrafter(EagleDrafter):
    """Proposes with a P-EAGLE head."""

    head: MaskHead

    def draft(self, unread: Unread, uniforms: Tensor) -> Draft:
        return self.draw(self.logits(unread, uniforms.shape[1]), uniforms)

    def logits(self, unread: Unread, count: int) -> Tensor:
        """Read the new features, and `count` - 1 masks behind each row's last one.

        Returns logits [B, count, V of the head] from that feature on. The next features overwrite
        the masks' entries in the cache.
        """
        head = self.head
        num_masks = count - 1
        states = head.join(unread.features)
        index = torch.arange(states.shape[1] + num_masks, device=states.device)
        is_mask = index >= unread.counts.unsqueeze(1)
        padded_tokens = nn.functional.pad(unread.following, (0, num_masks))
        tokens = padded_tokens.masked_fill(is_mask, head.config.mask_token_id)
        padded_states = nn.functional.pad(states, (0, 0, 0, num_masks))
        mask_state = head.join(head.mask_hidden)
        states = torch.where(is_mask.unsqueeze(-1), mask_state, padded_states)
        self.cache.place(unread.starts, states.shape[1])
        outputs = head(self.embed(tokens), states, self.cache)
        rows, last = unread.last()
        places = last.unsqueeze(1) + torch.arange(count, device=states.device)
        logits, _ = self.predict(outputs[rows.unsqueeze(1), places])
        return logits


class MaskHead(EagleHead):
    """The weights of a P-EAGLE head."""

    drafter_class = MaskDrafter
    config: MaskConfig

    def __init__(self, config: MaskConfig) -> None:
        super().__init__(config)
        num_features = len(config.layers) * config.target_size
        self.mask_hidden = nn.Parameter(torch.empty(1, 1, num_features))


class PEagle(Eagle3):
    """P-EAGLE, as speculators stores it."""

    name = "peagle"
    head_class = MaskHead
    one_pass = True

    def recognises(self, raw: Mapping[str, Any]) -> bool:
        kind = raw.get("speculators_model_type")
        has_masks = raw.get("mask_token_id") is not None
        return kind == "peagle" or (kind == "eagle3" and has_masks)

    def config(self, stored: StoredHead, shapes: Shapes | None) -> MaskConfig:
        mask = stored.token("mask_token_id", stored.raw.get("mask_token_id"))
        return MaskConfig(**self.fields(stored, shapes), mask_token_id=mask)


RECORD = PEagle()
