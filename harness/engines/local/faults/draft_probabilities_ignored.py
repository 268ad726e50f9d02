"""A draft token is accepted with the target's probability of it, whatever the draft's was; the token after a rejection
comes from the target and not from the residual.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch

from harness.decoding.verify import Offer, Verdict
from harness.decoding.warp import Warp
from harness.engines.local.fault import Fault


@dataclass(frozen=True)
class DraftIgnored:
    rule: Callable[[Offer], Verdict]

    def __call__(self, offer: Offer) -> Verdict:
        # Where draft probabilities of 1 leave no residual, `verify` draws from the target.
        ones = torch.ones_like(offer.target_probabilities[:, :-1])
        return self.rule(dataclasses.replace(offer, draft_probabilities=ones))


class DraftProbabilitiesIgnored(Fault):
    def verification(
        self, rule: Callable[[Offer], Verdict], warp: Warp
    ) -> Callable[[Offer], Verdict]:
        return DraftIgnored(rule)


RECORD = DraftProbabilitiesIgnored()
