"""The bonus token comes from the distribution of the last draft token, one position early."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from harness.local.decoding.randomness import inverse_cdf
from harness.local.decoding.tree_rules import TreeOffer, TreeRule, TreeVerdict
from harness.local.decoding.verify import Offer, Verdict
from harness.local.decoding.warp import Warp
from harness.local.engine.fault import Fault


class BonusFromWrongPosition(Fault):
    in_greedy_texts = True
    in_trees = True

    def verdict(self, rule: Callable[[Offer], Verdict], offer: Offer, warp: Warp) -> Verdict:
        target = offer.target_probabilities
        early = torch.cat([target[:, :-1], target[:, -2:-1]], dim=1)
        return rule(dataclasses.replace(offer, target_probabilities=early))

    def tree_verdict(self, rule: TreeRule, offer: TreeOffer, warp: Warp) -> TreeVerdict:
        # The token after an accepted leaf comes from the distribution of the leaf itself.
        verdict = rule(offer)
        rows = torch.arange(len(verdict.last_node), device=verdict.last_node.device)
        is_leaf = ~offer.children_of(verdict.last_node).any(1)
        parent = offer.parents[rows, (verdict.last_node - 1).clamp(min=0)]
        early = offer.target_probabilities[rows, parent]
        wrong = inverse_cdf(early, offer.next_uniforms[rows, verdict.num_accepted])
        is_wrong = is_leaf & (verdict.last_node > 0)
        next_token = torch.where(is_wrong, wrong, verdict.next_token)
        return dataclasses.replace(verdict, next_token=next_token)


RECORD = BonusFromWrongPosition()
