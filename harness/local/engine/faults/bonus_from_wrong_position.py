"""The bonus token comes from the distribution of the last draft token, one position early."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from harness.local.decoding.verify import Offer, Verdict
from harness.local.decoding.warp import Warp
from harness.local.engine.fault import Fault


class BonusFromWrongPosition(Fault):
    in_greedy_texts = True

    def verdict(self, rule: Callable[[Offer], Verdict], offer: Offer, warp: Warp) -> Verdict:
        target = offer.target_probabilities
        early = torch.cat([target[:, :-1], target[:, -2:-1]], dim=1)
        return rule(dataclasses.replace(offer, target_probabilities=early))


RECORD = BonusFromWrongPosition()
