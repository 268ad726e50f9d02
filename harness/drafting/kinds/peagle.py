"""P-EAGLE: an EAGLE-3 head with trained masks, which drafts all tokens in one pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.drafting.head_formats import Shapes, StoredHead
from harness.drafting.kinds.eagle3 import Eagle3, EagleConfig


class PEagle(Eagle3):
    """P-EAGLE, as speculators stores it."""

    name = "peagle"
    one_pass = True
    trains = False

    def recognises(self, raw: Mapping[str, Any]) -> bool:
        kind = raw.get("speculators_model_type")
        has_masks = raw.get("mask_token_id") is not None
        return kind == "peagle" or (kind == "eagle3" and has_masks)

    def config(self, stored: StoredHead, shapes: Shapes | None) -> EagleConfig:
        mask = stored.token("mask_token_id", stored.raw.get("mask_token_id"))
        return EagleConfig(**self.fields(stored, shapes), mask_token_id=mask)

    def vllm(self) -> dict[str, Any]:
        return {"method": "eagle3", "parallel_drafting": True}


RECORD = PEagle()
