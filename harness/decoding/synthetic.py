"""Verification by coin: how fast would a pair be if its draft agreed this often?

The output follows no model.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.decoding.verify import Offer, Verdict, accepted_prefix


@dataclass(frozen=True)
class AcceptByCoin:
    """Accepts each draft token with probability `bias` in [0, 1].

    `bias` becomes the conditional acceptance rate. Lenience is ignored. It does as much work as
    `verify`, so that times can be measured with it.
    """

    bias: float

    def __call__(self, offer: Offer) -> Verdict:
        decided = accepted_prefix(offer.accept_uniforms < self.bias, offer)
        return Verdict(*decided, offer.target_probability, offer.draft_probability)
