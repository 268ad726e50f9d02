"""Mistakes planted in speculative decoding on purpose, for tests to catch: `recovery fault=NAME`, `serve fault=NAME`.

Each is a mistake that somebody could make unnoticed: texts stay fluent, and nothing is raised. A fault is a class here,
and a name in `config/faults.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from harness.config.faults import FAULTS, FaultRecord
from harness.config.settings import DecodingSettings
from harness.local.decoding.protocols import Runner, Step
from harness.local.decoding.randomness import inverse_cdf
from harness.local.decoding.verify import Offer, Verdict
from harness.local.decoding.warp import BatchWarp
from harness.local.runners.base import Proxy

Verification = Callable[[Offer], Verdict]


class Fault(FaultRecord):
    """Base of all faults; by itself it changes nothing."""

    name = "none"

    def verdict(self, rule: Verification, warp: BatchWarp, offer: Offer) -> Verdict:
        """The verdict of a rule of acceptance, with the mistake in it.

        Args:
            warp: of the batch.
        """
        return rule(offer)

    def runner(self, runner: Runner) -> Runner:
        """The target's runner, with the mistake in its cache."""
        return runner


NONE = Fault()


def fault_of(name: str) -> Fault:
    """The fault of this name; `none` changes nothing.

    Raises:
        SettingError: there is none.
    """
    fault = NONE if name == "none" else FAULTS[name]
    assert isinstance(fault, Fault)
    return fault


class StaleRunner(Proxy):
    """Keeps `num_stale` rejected tokens of each row."""

    def __init__(self, runner: Runner) -> None:
        super().__init__(runner)
        self._num_extended = 0

    def num_stale(self, num_rows: int) -> list[int]:
        """How many rejected tokens each row keeps when it is rolled back. Tests override this."""
        return [1] * num_rows

    def extend(self, tokens: Tensor) -> Step:
        self._num_extended += tokens.shape[1]
        step: Step = self._wrapped.extend(tokens)
        return step

    def keep(self, counts: Sequence[int]) -> None:
        stale = self.num_stale(len(counts))
        # No more than the runner was extended by.
        too_many = [
            min(count + more, self._num_extended) for count, more in zip(counts, stale, strict=True)
        ]
        self._wrapped.keep(too_many)
        self._num_extended = 0


class RollbackOffByOne(Fault):
    """One token too many is kept after a rejection: the rejected token stays in the cache, stale."""

    in_greedy_texts = True

    def runner(self, runner: Runner) -> Runner:
        return StaleRunner(runner)


class ResidualWarpedTwice(Fault):
    """The residual after a rejection is warped once more, although it is made of warped distributions."""

    def why_idle(self, decoding: DecodingSettings) -> str | None:
        if decoding.temperature == 1 and decoding.top_k == 0 and decoding.top_p == 1:
            return "at decoding.temperature=1 without top_k or top_p"
        return super().why_idle(decoding)

    def verdict(self, rule: Verification, warp: BatchWarp, offer: Offer) -> Verdict:
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
        recovered = (verdict.num_accepted < offer.lengths) & (residual.sum(-1) > 0)
        next_token = torch.where(recovered, wrong, verdict.next_token)
        return dataclasses.replace(verdict, next_token=next_token)


class BonusFromWrongPosition(Fault):
    """The bonus token comes from the distribution of the last draft token, one position early."""

    in_greedy_texts = True

    def verdict(self, rule: Verification, warp: BatchWarp, offer: Offer) -> Verdict:
        target = offer.target_probabilities
        early = torch.cat([target[:, :-1], target[:, -2:-1]], dim=1)
        return rule(dataclasses.replace(offer, target_probabilities=early))


class DraftProbabilitiesIgnored(Fault):
    """A draft token is accepted with the target's probability of it, whatever the draft's was; the
    token after a rejection comes from the target and not from the residual.
    """

    def verdict(self, rule: Verification, warp: BatchWarp, offer: Offer) -> Verdict:
        # Where draft probabilities of 1 leave no residual, `verify` draws from the target.
        ones = torch.ones_like(offer.target_probabilities[:, :-1])
        return rule(dataclasses.replace(offer, draft_probabilities=ones))
