"""A draft token is accepted with the target's probability of it, whatever the draft's was; the token after a rejection
comes from the target and not from the residual.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from harness.local.decoding.verify import Offer, Verdict
from harness.local.decoding.warp import Warp
from harness.local.engine.fault import Fault


class DraftProbabilitiesIgnored(Fault):
    def verdict(self, rule: Callable[[Offer], Verdict], offer: Offer, warp: Warp) -> Verdict:
        # Where draft probabilities of 1 leave no residual, `verify` draws from the target.
        ones = torch.ones_like(offer.target_probabilities[:, :-1])
        return rule(dataclasses.replace(offer, draft_probabilities=ones))


RECORD = DraftProbabilitiesIgnored()
