"""Speculative decoding with a mistake planted on purpose, which a test of losslessness must catch.

Each is a mistake that somebody could make without noticing: texts stay fluent and nothing is raised.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from harness.config.commands import Fault
from harness.decoding.protocols import Step
from harness.decoding.randomness import inverse_cdf
from harness.decoding.verify import Offer, Verdict
from harness.decoding.warp import Warp
from harness.engines.stopwatches import Replacing

# Of the fault `lenience`: a draft token is accepted with min(1, target / (0.8 draft)).
LENIENCE = 0.8

Verification = Callable[[Offer], Verdict]


def faulty_verification(fault: Fault, warp: Warp, verification: Verification) -> Verification:
    """`verification` with the fault in it, so far as it is one of verification."""
    wrong: dict[str, Verification] = {
        "residual_warped_twice": functools.partial(residual_warped_twice, warp, verification),
        "bonus_from_wrong_position": functools.partial(bonus_from_wrong_position, verification),
        "draft_probabilities_ignored": functools.partial(draft_probabilities_ignored, verification),
    }
    return wrong.get(fault, verification)


def residual_warped_twice(warp: Warp, verification: Verification, offer: Offer) -> Verdict:
    """The residual, made of warped distributions, goes through temperature, top-k and top-p once more."""
    verdict, target, draft = (
        verification(offer),
        offer.target_probabilities,
        offer.draft_probabilities,
    )
    num_rows, num_draft_tokens = offer.draft_tokens.shape
    if draft is None:
        draft = one_hot(offer.draft_tokens, target.shape[-1])
    rows = torch.arange(num_rows, device=target.device)
    place = verdict.num_accepted.clamp(max=num_draft_tokens - 1)
    residual = (target[rows, place] - draft[rows, place]).clamp(min=0)
    wrong = inverse_cdf(warp(residual.log()), offer.next_uniforms[rows, place])
    rejected = verdict.num_accepted < (num_draft_tokens if offer.lengths is None else offer.lengths)
    next_token = torch.where(rejected & (residual.sum(-1) > 0), wrong, verdict.next_token)
    return dataclasses.replace(verdict, next_token=next_token)


def bonus_from_wrong_position(verification: Verification, offer: Offer) -> Verdict:
    """The bonus token comes from the distribution of the last draft token, one position early."""
    target = offer.target_probabilities
    early = torch.cat([target[:, :-1], target[:, -2:-1]], dim=1)
    return verification(dataclasses.replace(offer, target_probabilities=early))


def draft_probabilities_ignored(verification: Verification, offer: Offer) -> Verdict:
    """A draft token is accepted with its probability under the target, and recovered from the target as it is."""
    # With a draft probability of 1 everywhere no residual is left, and the target itself is then taken.
    ones = torch.ones_like(offer.target_probabilities[:, :-1])
    return verification(dataclasses.replace(offer, draft_probabilities=ones))


def rollback_off_by_one(runner: Any) -> Any:
    """The runner, but it keeps one token too many after a rejection: the rejected token stays in the cache."""
    num_extended = 0

    def extend(tokens: Tensor) -> Step:
        nonlocal num_extended
        num_extended += tokens.shape[1]
        step: Step = runner.extend(tokens)
        return step

    def keep(counts: Sequence[int]) -> None:
        nonlocal num_extended
        runner.keep([min(count + 1, num_extended) for count in counts])
        num_extended = 0

    return Replacing(runner, extend=extend, keep=keep)
