"""DSpark: a DFlash head whose tokens are drawn one after the other, with a bias by the token before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.drafting.kinds.dflash import DFlash, has_blocks


class DSpark(DFlash):
    """DSpark, as speculators and DeepSpec store it."""

    name = "dspark"
    trains = False
    usual_rank = 256
    usually_from_anchor = True

    def recognises(self, raw: Mapping[str, Any]) -> bool:
        if "speculators_model_type" in raw:
            return raw["speculators_model_type"] == "dspark"
        is_flat = has_blocks(raw) and "dflash_config" not in raw
        return is_flat and bool(raw.get("markov_rank"))


RECORD = DSpark()
