"""The residual after a rejection is warped once more, although it is made of warped distributions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from harness.config.settings import DecodingSettings
from harness.local.decoding.randomness import inverse_cdf
from harness.local.decoding.verify import Offer, Verdict
from harness.local.decoding.warp import Warp
from harness.local.engine.fault import Fault


class ResidualWarpedTwice(Fault):
    def why_idle(self, decoding: DecodingSettings) -> str | None:
        if decoding.temperature == 1 and decoding.top_k == 0 and decoding.top_p == 1:
            return "at decoding.temperature=1 without top_k or top_p"
        return super().why_idle(decoding)

    def verdict(self, rule: Callable[[Offer], Verdict], offer: Offer, warp: Warp) -> Verdict:
        verdict = rule(offer)
        target = offer.target_probabilities
        draft = offer.draft_probabilities
        num_rows, num_draft_tokens = offer.draft_tokens.shape
        if draft is None:
            # A deterministic drafter's distribution is one-hot.
            draft = torch.zeros_like(target[:, :-1])
            draft = draft.scatter(-1, offer.draft_tokens.unsqueeze(-1), 1.0)
        rows = torch.arange(num_rows, device=target.device)
        place = verdict.num_accepted.clamp(max=num_draft_tokens - 1)
        residual = (target[rows, place] - draft[rows, place]).clamp(min=0)
        wrong = inverse_cdf(warp(residual.log()), offer.next_uniforms[rows, place])
        lengths = num_draft_tokens if offer.lengths is None else offer.lengths
        recovered = (verdict.num_accepted < lengths) & (residual.sum(-1) > 0)
        next_token = torch.where(recovered, wrong, verdict.next_token)
        return dataclasses.replace(verdict, next_token=next_token)


RECORD = ResidualWarpedTwice()
