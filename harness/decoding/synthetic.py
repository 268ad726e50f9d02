"""Verification by coin: how fast would a pair be if its draft agreed this often?

Takes the place of `verify` where `decoding.synthetic_acceptance` is set. The output follows no
model.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.decoding.verify import Offer, Verdict, accepted_prefix


@dataclass(frozen=True)
class AcceptByCoin:
    """Accepts the draft token at each position with the probability that `rates` have for it.

    The rates, in [0, 1], become the conditional acceptance rates by position; the last one holds
    for all later positions. Lenience is ignored. It does as much work as `verify`, so that times
    can be measured with it.
    """

    rates: tuple[float, ...]

    def __call__(self, offer: Offer) -> Verdict:
        uniforms = offer.accept_uniforms
        accepted = uniforms < self.rates[-1]
        num_draft_tokens = uniforms.shape[1]
        for place, rate in enumerate(self.rates[:-1][:num_draft_tokens]):
            accepted[:, place] = uniforms[:, place] < rate
        num_accepted, next_token = accepted_prefix(accepted, offer)
        return Verdict(num_accepted, next_token, offer.target_probability, offer.draft_probability)
