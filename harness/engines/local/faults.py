"""Speculative decoding with a mistake planted on purpose, which a test of losslessness must catch.

`fault=NAME` of `recovery` plants one. Each is a mistake that somebody could make without noticing:
texts stay fluent and nothing is raised. There are faults of verification (an `Offer` is judged
wrongly), of caches (a runner keeps the wrong tokens) and of warps (a row is drawn with the wrong
settings). `local` plants those of caches and warps; `acceptance` plants those of verification,
`LENIENCE` and `TreeBonusFromWrongPosition` too. Faulty rules compare by value and the faulty runner
hands its calls on, so that a fault runs on the same prepared code as the real arm.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.config.settings import Fault
from harness.decoding.protocols import Runner, Step
from harness.decoding.randomness import inverse_cdf
from harness.decoding.transfer import added, at_most
from harness.decoding.tree_rules import TreeOffer, TreeRule, TreeVerdict
from harness.decoding.trees import TreeShape
from harness.decoding.verify import Offer, Verdict
from harness.decoding.warp import BatchWarp, Warp
from harness.runners.wrapped import WrappedRunner

# With the fault `stale_prefix`, prompts count as the same that share this many first tokens.
_PREFIX_TOKENS = 4
# With the fault `lenience` a draft token is accepted with min(1, target / (0.8 draft)).
LENIENCE = 0.8

Verification = Callable[[Offer], Verdict]


def faulty_verification(fault: Fault, warp: Warp, verification: Verification) -> Verification:
    """Return `verification` with the fault in it, if the fault is one of verification."""
    if fault == "residual_warped_twice":
        return ResidualWarpedTwice(verification, warp)
    change = _WRONG_OFFERS.get(fault)
    return verification if change is None else WrongOffer(verification, change)


def faulty_runner(fault: Fault, runner: Runner) -> Runner:
    """Return `runner` with the fault around it, if the fault is one of caches."""
    faulty = _FAULTY_RUNNERS.get(fault)
    return runner if faulty is None else faulty(runner)


def faulty_warp(fault: Fault) -> BatchWarp:
    """Return the warp of a batch, with the fault in it if it is one of warps."""
    return NeighbourWarp() if fault == "neighbour_temperature" else BatchWarp()


@dataclass(frozen=True)
class ResidualWarpedTwice:
    """The token after a rejection is drawn from the residual warped once more.

    The residual is made of distributions that are warped already.
    """

    verification: Verification
    warp: Warp

    def __call__(self, offer: Offer) -> Verdict:
        verdict = self.verification(offer)
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
        wrong = inverse_cdf(self.warp(residual.log()), offer.next_uniforms[rows, place])
        lengths = num_draft_tokens if offer.lengths is None else offer.lengths
        recovered = (verdict.num_accepted < lengths) & (residual.sum(-1) > 0)
        next_token = torch.where(recovered, wrong, verdict.next_token)
        return dataclasses.replace(verdict, next_token=next_token)


@dataclass(frozen=True)
class WrongOffer:
    """The verification of an offer that a mistake has changed."""

    verification: Verification
    change: Callable[[Offer], Offer]

    def __call__(self, offer: Offer) -> Verdict:
        return self.verification(self.change(offer))


def _one_position_early(offer: Offer) -> Offer:
    """The bonus token comes from the distribution of the last draft token, one position early."""
    target = offer.target_probabilities
    early = torch.cat([target[:, :-1], target[:, -2:-1]], dim=1)
    return dataclasses.replace(offer, target_probabilities=early)


def _draft_ignored(offer: Offer) -> Offer:
    """A draft token is accepted with the target's probability of it, whatever the draft's was.

    The token after a rejection comes from the target, not from the residual.
    """
    # Where draft probabilities of 1 leave no residual, `verify` draws from the target.
    ones = torch.ones_like(offer.target_probabilities[:, :-1])
    return dataclasses.replace(offer, draft_probabilities=ones)


def _argmax_beyond_two_rows(offer: Offer) -> Offer:
    """From the third row of a batch on, tokens are the target's likeliest ones."""
    target = offer.target_probabilities.clone()
    target[2:] = Warp(temperature=0)(target[2:])
    return dataclasses.replace(offer, target_probabilities=target)


_WRONG_OFFERS: Mapping[Fault, Callable[[Offer], Offer]] = {
    "bonus_from_wrong_position": _one_position_early,
    "draft_probabilities_ignored": _draft_ignored,
    "argmax_beyond_two_rows": _argmax_beyond_two_rows,
}


class NeighbourWarp(BatchWarp):
    """Each row is drawn with the settings of the next row in the batch."""

    def set_rows(self, rows: Sequence[Warp]) -> None:
        super().set_rows([*rows[1:], rows[0]])


@dataclass(frozen=True)
class TreeBonusFromWrongPosition:
    """The token after an accepted leaf comes from the distribution of the leaf itself."""

    rule: TreeRule

    def __call__(self, offer: TreeOffer) -> TreeVerdict:
        verdict = self.rule(offer)
        rows = torch.arange(len(verdict.last_node), device=verdict.last_node.device)
        is_leaf = ~offer.children_of(verdict.last_node).any(1)
        parent = offer.parents[rows, (verdict.last_node - 1).clamp(min=0)]
        early = offer.target_probabilities[rows, parent]
        wrong = inverse_cdf(early, offer.next_uniforms[rows, verdict.num_accepted])
        is_wrong = is_leaf & (verdict.last_node > 0)
        next_token = torch.where(is_wrong, wrong, verdict.next_token)
        return dataclasses.replace(verdict, next_token=next_token)


class RollbackOffByOne(WrappedRunner):
    """Keeps one token too many after a rejection: the rejected token stays in the cache, stale."""

    def __init__(self, runner: Runner) -> None:
        super().__init__(runner)
        self._num_extended = 0

    def extend(self, tokens: Tensor, tree: TreeShape | None = None) -> Step:
        self._num_extended += tokens.shape[1]
        return super().extend(tokens, tree)

    def decide(
        self,
        tokens: Tensor,
        decision: Callable[..., tuple[Tensor, ...]],
        *inputs: Tensor,
        tree: TreeShape | None = None,
    ) -> tuple[Step, tuple[Tensor, ...]]:
        self._num_extended += tokens.shape[1]
        return super().decide(tokens, decision, *inputs, tree=tree)

    def keep_path(self, paths: Tensor, counts: Sequence[int]) -> None:
        # Behind the accepted nodes of a tree, `paths` has its rejected ones: one more is stale.
        super().keep_path(paths, self._too_many(counts))
        self._num_extended = 0

    def keep(self, counts: Sequence[int]) -> None:
        super().keep(self._too_many(counts))
        self._num_extended = 0

    def _too_many(self, counts: Sequence[int]) -> Sequence[int]:
        """The counts to keep with the stale tokens, and no more than the runner was extended by."""
        return at_most(added(counts, self._num_stale(len(counts))), self._num_extended)

    def _num_stale(self, num_rows: int) -> list[int]:
        """How many rejected tokens each row keeps."""
        return [1] * num_rows


class LeavingOffByOne(RollbackOffByOne):
    """Keeps a rejected token only in the first roll-back after a row has left the batch."""

    def __init__(self, runner: Runner) -> None:
        super().__init__(runner)
        self._some_left = False

    def start(self, prompts: Sequence[Sequence[int]]) -> Step:
        self._some_left = False
        return super().start(prompts)

    def select(self, rows: Sequence[int]) -> None:
        self._some_left = True
        super().select(rows)

    def _num_stale(self, num_rows: int) -> list[int]:
        stale = [int(self._some_left)] * num_rows
        self._some_left = False
        return stale


class StalePrefix(RollbackOffByOne):
    """Keeps a rejected token only in rows whose prompt begins as that of an earlier row of the
    batch.
    """

    def __init__(self, runner: Runner) -> None:
        super().__init__(runner)
        self._prefixes: list[tuple[int, ...]] = []
        self._hits: list[int] = []

    def start(self, prompts: Sequence[Sequence[int]]) -> Step:
        self._prefixes = []
        self._hits = []
        self._note(prompts)
        return super().start(prompts)

    def add(self, prompts: Sequence[Sequence[int]]) -> Step:
        self._note(prompts)
        return super().add(prompts)

    def select(self, rows: Sequence[int]) -> None:
        self._prefixes = [self._prefixes[row] for row in rows]
        self._hits = [self._hits[row] for row in rows]
        super().select(rows)

    def _note(self, prompts: Sequence[Sequence[int]]) -> None:
        for prompt in prompts:
            prefix = tuple(prompt[:_PREFIX_TOKENS])
            self._hits.append(int(prefix in self._prefixes))
            self._prefixes.append(prefix)

    def _num_stale(self, num_rows: int) -> list[int]:
        return list(self._hits)


class RowsSwapped(WrappedRunner):
    """Where a row leaves and more than two stay, the caches of the last two change places.

    A test with batches of up to three rows would not notice.
    """

    def select(self, rows: Sequence[int]) -> None:
        if len(rows) > 2:
            rows = [*rows[:-2], rows[-1], rows[-2]]
        super().select(rows)


_FAULTY_RUNNERS: Mapping[Fault, Callable[[Runner], Runner]] = {
    "rollback_off_by_one": RollbackOffByOne,
    "leaving_off_by_one": LeavingOffByOne,
    "stale_prefix": StalePrefix,
    "rows_swapped": RowsSwapped,
}
