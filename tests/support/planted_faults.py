"""Mistakes planted in speculative decoding, each as the local engine with it: `engine=planted("Lenience")`.

Each is a mistake that somebody could make unnoticed: texts stay fluent, and nothing is raised.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from harness.config.acceptance_rules import RULES
from harness.config.settings import DecodingSettings
from harness.engines.protocol import Engine
from harness.engines.record import Opening
from harness.local.decoding.iteration import BatchSize, Calls
from harness.local.decoding.protocols import Runner, Step
from harness.local.decoding.randomness import inverse_cdf
from harness.local.decoding.verify import Offer, Verdict
from harness.local.decoding.warp import BatchWarp, Warp
from harness.local.engine.engine import LocalArm
from harness.local.engine.records import Local
from harness.local.engine.runners import verification_of
from harness.local.runners.base import Proxy

# Prompts count as the same that share this many first tokens.
_PREFIX_TOKENS = 4

IN_BATCHES = ("ArgmaxBeyondTwoRows", "StalePrefix")


def planted(name: str) -> str:
    """The value of `engine=` for a class of this file."""
    return f"{__file__}:{name}"


@dataclass(frozen=True, kw_only=True)
class FaultyArm(LocalArm):
    """A speculative arm with a mistake in it. What takes the place of a runner or a rule counts on the host."""

    fault: Fault

    def calls(self, decoding: DecodingSettings, batch: BatchSize) -> Calls:
        warp = BatchWarp()
        rule = verification_of(decoding)
        return Calls(
            self.fault.runner(self.runners.target),
            self.runners.make_drafter(warp),
            decoding.most_draft_tokens,
            verification=functools.partial(self.fault.verdict, rule, warp),
            redraw=RULES[decoding.rule].redraws,
            warp=warp,
        )


def plant(engine: Engine, fault: Fault) -> None:
    """Give the speculative arm of a local engine a fault."""
    regular, speculative = engine.arms
    engine.arms = [regular, FaultyArm(**vars(speculative), fault=fault)]


class Fault(Local):
    """Base of all faults; by itself it changes nothing."""

    def open(self, opening: Opening) -> Engine:
        engine = super().open(opening)
        plant(engine, self)
        return engine

    def verdict(self, rule: Callable[[Offer], Verdict], warp: BatchWarp, offer: Offer) -> Verdict:
        return rule(offer)

    def runner(self, runner: Runner) -> Runner:
        return runner


class StaleRunner(Proxy):
    """Keeps a rejected token of each row that is rolled back."""

    def start(self, prompts: Sequence[Sequence[int]], num_slots: int = 0, **named: Any) -> Step:
        self._ends = list(map(len, prompts))
        self._num_stale = [0] * len(prompts)
        # Those that stay need slots, too.
        return self._wrapped.start(prompts, 2 * num_slots, **named)

    def is_stale(self, row: int) -> bool:
        """Whether a row has the mistake."""
        return True

    def extend(self, tokens: Tensor, starts: Sequence[int | None], **named: Any) -> Step:
        shifted: list[int | None] = []
        for row, start in enumerate(starts):
            if start is None:
                shifted.append(None)
                continue
            if start < self._ends[row] and self.is_stale(row):
                self._num_stale[row] += 1
            self._ends[row] = start + tokens.shape[1]
            shifted.append(start + self._num_stale[row])
        return self._wrapped.extend(tokens, shifted, **named)


class RollbackOffByOne(Fault):
    """One token too many is kept after a rejection: the rejected token stays in the cache, stale."""

    def runner(self, runner: Runner) -> Runner:
        return StaleRunner(runner)


class ResidualWarpedTwice(Fault):
    """The residual after a rejection is warped once more, although it is made of warped distributions."""

    def verdict(self, rule: Callable[[Offer], Verdict], warp: BatchWarp, offer: Offer) -> Verdict:
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
        return verdict._replace(next_token=next_token)


class ResidualOfNextPosition(Fault):
    """The residual after a rejection is taken with the draft's distribution of the position behind it."""

    def verdict(self, rule: Callable[[Offer], Verdict], warp: BatchWarp, offer: Offer) -> Verdict:
        verdict = rule(offer)
        draft = offer.draft_probabilities
        assert draft is not None
        rows = torch.arange(len(draft), device=draft.device)
        place = verdict.num_accepted.clamp(max=draft.shape[1] - 1)
        behind = (place + 1).clamp(max=draft.shape[1] - 1)
        residual = (offer.target_probabilities[rows, place] - draft[rows, behind]).clamp(min=0)
        wrong = inverse_cdf(residual, offer.next_uniforms[rows, place])
        recovered = (verdict.num_accepted < offer.lengths) & (residual.sum(-1) > 0)
        next_token = torch.where(recovered, wrong, verdict.next_token)
        return verdict._replace(next_token=next_token)


class BonusFromWrongPosition(Fault):
    """The bonus token comes from the distribution of the last draft token, one position early."""

    def verdict(self, rule: Callable[[Offer], Verdict], warp: BatchWarp, offer: Offer) -> Verdict:
        target = offer.target_probabilities
        early = torch.cat([target[:, :-1], target[:, -2:-1]], dim=1)
        return rule(dataclasses.replace(offer, target_probabilities=early))


class DraftProbabilitiesIgnored(Fault):
    """A draft token is accepted with the target's probability of it, whatever the draft's was; the
    token after a rejection comes from the target and not from the residual.
    """

    def verdict(self, rule: Callable[[Offer], Verdict], warp: BatchWarp, offer: Offer) -> Verdict:
        # Where draft probabilities of 1 leave no residual, `verify` draws from the target.
        ones = torch.ones_like(offer.target_probabilities[:, :-1])
        return rule(dataclasses.replace(offer, draft_probabilities=ones))


class Lenience(Fault):
    """A draft token is accepted with min(1, target / (0.8 draft)), although the settings ask for no lenience."""

    def verdict(self, rule: Callable[[Offer], Verdict], warp: BatchWarp, offer: Offer) -> Verdict:
        return rule(dataclasses.replace(offer, accept_uniforms=0.8 * offer.accept_uniforms))


class ArgmaxBeyondTwoRows(Fault):
    """From the third row of a batch on, tokens are the target's likeliest ones."""

    def verdict(self, rule: Callable[[Offer], Verdict], warp: BatchWarp, offer: Offer) -> Verdict:
        target = offer.target_probabilities.clone()
        target[2:] = Warp(temperature=0)(target[2:])
        return rule(dataclasses.replace(offer, target_probabilities=target))


class _StalePrefixRunner(StaleRunner):
    def start(self, prompts: Sequence[Sequence[int]], num_slots: int = 0, **named: Any) -> Step:
        prefixes = [tuple(prompt[:_PREFIX_TOKENS]) for prompt in prompts]
        self._hits = [prefix in prefixes[:row] for row, prefix in enumerate(prefixes)]
        return super().start(prompts, num_slots, **named)

    def is_stale(self, row: int) -> bool:
        return self._hits[row]


class StalePrefix(Fault):
    """A rejected token stays in the cache in rows whose prompt begins as that of an earlier row of the batch."""

    def runner(self, runner: Runner) -> Runner:
        return _StalePrefixRunner(runner)


class SamplesCompared(Fault):
    """The target draws at each place, and the draft's token is kept where both are the same, as in mlx-lm: lossless."""

    def verdict(self, rule: Callable[[Offer], Verdict], warp: BatchWarp, offer: Offer) -> Verdict:
        # Of a token that comes without probabilities just that is the rule.
        return rule(dataclasses.replace(offer, draft_probabilities=None))


class LastDropped(Fault):
    """The last of K draft tokens never counts; at the end of a text there are fewer."""

    k = 1

    def verdict(self, rule: Callable[[Offer], Verdict], warp: BatchWarp, offer: Offer) -> Verdict:
        self.k = max(self.k, offer.draft_tokens.shape[1])
        fewer = offer.lengths.clamp(max=self.k - 1)
        return rule(dataclasses.replace(offer, lengths=fewer))
