"""Verification by coin: how fast would a pair be if its draft agreed this often? The output follows no model."""

from __future__ import annotations

from harness.decoding.verify import Offer, Verdict, accepted_prefix


def verify_by_coin(bias: float, offer: Offer) -> Verdict:
    """Accept each draft token with probability `bias` in [0, 1], which becomes the conditional acceptance rate.

    Lenience is ignored. As much work as in `verify`, to measure times.
    """
    decided = accepted_prefix(offer.accept_uniforms < bias, offer)
    return Verdict(*decided, offer.target_probability, offer.draft_probability)
