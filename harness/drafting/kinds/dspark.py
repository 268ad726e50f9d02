"""DSpark: a DFlash head whose tokens are drawn one after the other, with a bias by the token before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.drafting.block_formats import LeftOut, is_deepspec, is_speculators
from harness.drafting.kinds.dflash import DFlash


class DSpark(DFlash):
    """DSpark, as speculators and DeepSpec store it."""

    name = "dspark"
    trains = False
    left_out = LeftOut(markov_rank=256, from_anchor=True)

    def recognises(self, raw: Mapping[str, Any]) -> bool:
        if is_speculators(raw):
            return raw["speculators_model_type"] == self.name
        return is_deepspec(raw) and bool(raw.get("markov_rank"))


RECORD = DSpark()
