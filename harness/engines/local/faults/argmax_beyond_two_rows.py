"""From the third row of a batch on, tokens are the target's likeliest ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from harness.decoding.verify import Offer, Verdict
from harness.decoding.warp import Warp
from harness.engines.local.fault import Fault


class ArgmaxBeyondTwoRows(Fault):
    fewest_rows = 3

    def verdict(self, rule: Callable[[Offer], Verdict], offer: Offer, warp: Warp) -> Verdict:
        target = offer.target_probabilities.clone()
        target[2:] = Warp(temperature=0)(target[2:])
        return rule(dataclasses.replace(offer, target_probabilities=target))


RECORD = ArgmaxBeyondTwoRows()
