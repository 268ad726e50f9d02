"""Speculative decoding with a mistake planted on purpose: what a test of losslessness must catch.

Each is a mistake that somebody could make without noticing: texts stay fluent and nothing is raised.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from harness.config.commands import Fault
from harness.config.settings import DecodingSettings
from harness.decoding.loops import speculative
from harness.decoding.protocols import Runner
from harness.decoding.randomness import inverse_cdf
from harness.decoding.verify import Verdict, verify
from harness.decoding.warp import Warp
from harness.experiments.arms import Arm, Players, verification, warp

# Of the fault `lenience`: a draft token is accepted with min(1, target / (0.8 draft)).
LENIENCE = 0.8


def faulty_arm(players: Players, decoding: DecodingSettings, fault: Fault) -> Arm:
    """The speculative arm with `fault` in it; with `none` it is the one that `Players.arms` has."""
    target, drafter = players.target, players.drafter
    if drafter is None:
        raise ValueError("without a drafter there is no speculative arm")
    judge = verification(decoding)
    if fault == "residual_warped_twice":
        judge = functools.partial(residual_warped_twice, warp(decoding))
    elif fault == "bonus_from_wrong_position":
        judge = bonus_from_wrong_position
    elif fault == "rollback_off_by_one":
        target = RollbackOffByOne(target)
    elif fault == "draft_probabilities_ignored":
        judge = draft_probabilities_ignored
    lenience = LENIENCE if fault == "lenience" else decoding.lenience
    return Arm(
        "speculative",
        lambda request: speculative(target, drafter, request, decoding.num_draft_tokens, lenience, judge),
    )


def residual_warped_twice(
    warping: Warp,
    target_probabilities: Tensor,
    draft_tokens: Tensor,
    draft_probabilities: Tensor,
    accept_uniforms: Tensor,
    next_uniforms: Tensor,
    lenience: float = 1.0,
    limits: Tensor | None = None,
) -> Verdict:
    """The residual, made of warped distributions, goes through temperature, top-k and top-p once more."""
    verdict = verify(
        target_probabilities, draft_tokens, draft_probabilities, accept_uniforms, next_uniforms, lenience, limits
    )
    num_rows, num_draft_tokens = draft_tokens.shape
    rows = torch.arange(num_rows, device=draft_tokens.device)
    rejected_at = verdict.num_accepted.clamp(max=num_draft_tokens - 1)
    residual = (target_probabilities[rows, rejected_at] - draft_probabilities[rows, rejected_at]).clamp(min=0)
    wrong = inverse_cdf(warping(residual.log()), next_uniforms[rows, rejected_at])
    recovered = (verdict.num_accepted < (num_draft_tokens if limits is None else limits)) & (residual.sum(-1) > 0)
    return dataclasses.replace(verdict, next_token=torch.where(recovered, wrong, verdict.next_token))


def bonus_from_wrong_position(target_probabilities: Tensor, *others: Any) -> Verdict:
    """The bonus token comes from the distribution of the last draft token, one position early."""
    return verify(torch.cat([target_probabilities[:, :-1], target_probabilities[:, -2:-1]], dim=1), *others)


def draft_probabilities_ignored(
    target_probabilities: Tensor, draft_tokens: Tensor, draft_probabilities: Tensor, *others: Any
) -> Verdict:
    """A draft token is accepted with its probability under the target, and recovered from the target as it is."""
    # Against a draft probability of 1 everywhere no residual is left, and `verify` then takes the target itself.
    return verify(target_probabilities, draft_tokens, torch.ones_like(draft_probabilities), *others)


class RollbackOffByOne:
    """A `Runner` that keeps one token too many after a rejection: the rejected token stays in the cache."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._num_extended = 0

    def start(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        self._num_extended = 0
        return self._runner.start(prompts)

    def extend(self, tokens: Tensor) -> Tensor:
        self._num_extended += tokens.shape[1]
        return self._runner.extend(tokens)

    def keep(self, counts: Sequence[int]) -> None:
        self._runner.keep([min(count + 1, self._num_extended) for count in counts])
        self._num_extended = 0

    def select(self, rows: Sequence[int]) -> None:
        self._runner.select(rows)
