"""Speculative decoding with a mistake planted on purpose: what a test of losslessness must catch.

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
from harness.decoding.protocols import Runner, Step
from harness.decoding.randomness import inverse_cdf
from harness.decoding.verify import Verdict
from harness.decoding.warp import Warp

# Of the fault `lenience`: a draft token is accepted with min(1, target / (0.8 draft)).
LENIENCE = 0.8

Verification = Callable[..., Verdict]


def faulty_verification(fault: Fault, warp: Warp, verification: Verification) -> Verification:
    """`verification` with the fault in it, so far as it is one of verification."""
    wrong: dict[str, Verification] = {
        "residual_warped_twice": functools.partial(residual_warped_twice, warp, verification),
        "bonus_from_wrong_position": functools.partial(bonus_from_wrong_position, verification),
        "draft_probabilities_ignored": functools.partial(draft_probabilities_ignored, verification),
    }
    return wrong.get(fault, verification)


def residual_warped_twice(
    warp: Warp,
    verification: Verification,
    target: Tensor,
    tokens: Tensor,
    draft: Tensor | None,
    accept_uniforms: Tensor,
    next_uniforms: Tensor,
    lenience: float = 1.0,
    lengths: Tensor | None = None,
) -> Verdict:
    """The residual, made of warped distributions, goes through temperature, top-k and top-p once more."""
    verdict = verification(target, tokens, draft, accept_uniforms, next_uniforms, lenience, lengths)
    if draft is None:
        draft = one_hot(tokens, target.shape[-1])
    rows, place = torch.arange(len(tokens), device=tokens.device), verdict.num_accepted.clamp(max=tokens.shape[1] - 1)
    residual = (target[rows, place] - draft[rows, place]).clamp(min=0)
    wrong = inverse_cdf(warp(residual.log()), next_uniforms[rows, place])
    recovered = (verdict.num_accepted < (tokens.shape[1] if lengths is None else lengths)) & (residual.sum(-1) > 0)
    return dataclasses.replace(verdict, next_token=torch.where(recovered, wrong, verdict.next_token))


def bonus_from_wrong_position(verification: Verification, target: Tensor, *others: Any) -> Verdict:
    """The bonus token comes from the distribution of the last draft token, one position early."""
    return verification(torch.cat([target[:, :-1], target[:, -2:-1]], dim=1), *others)


def draft_probabilities_ignored(
    verification: Verification, target: Tensor, tokens: Tensor, draft: Tensor | None, *others: Any
) -> Verdict:
    """A draft token is accepted with its probability under the target, and recovered from the target as it is."""
    # With a draft probability of 1 everywhere no residual is left, and the target itself is then taken.
    return verification(target, tokens, torch.ones_like(target[:, :-1]), *others)


class RollbackOffByOne:
    """A `Runner` that keeps one token too many after a rejection: the rejected token stays in the cache."""

    def __init__(self, runner: Runner) -> None:
        self._runner, self._num_extended = runner, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def extend(self, tokens: Tensor) -> Step:
        self._num_extended += tokens.shape[1]
        return self._runner.extend(tokens)

    def keep(self, counts: Sequence[int]) -> None:
        self._runner.keep([min(count + 1, self._num_extended) for count in counts])
        self._num_extended = 0
