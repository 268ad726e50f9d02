"""From the third row of a batch on, tokens are the target's likeliest ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from harness.decoding.verify import Offer, Verdict
from harness.decoding.warp import Warp
from harness.engines.local.fault import Fault


@dataclass(frozen=True)
class ArgmaxOfLaterRows:
    rule: Callable[[Offer], Verdict]

    def __call__(self, offer: Offer) -> Verdict:
        target = offer.target_probabilities.clone()
        target[2:] = Warp(temperature=0)(target[2:])
        return self.rule(dataclasses.replace(offer, target_probabilities=target))


class ArgmaxBeyondTwoRows(Fault):
    fewest_rows = 3

    def verification(
        self, rule: Callable[[Offer], Verdict], warp: Warp
    ) -> Callable[[Offer], Verdict]:
        return ArgmaxOfLaterRows(rule)


RECORD = ArgmaxBeyondTwoRows()
