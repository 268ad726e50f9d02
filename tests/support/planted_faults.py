"""Mistakes that tests of batches plant: `fault=planted("RowsSwapped")`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from harness.local.decoding.protocols import Runner, Step
from harness.local.decoding.verify import Offer, Verdict
from harness.local.decoding.warp import BatchWarp, Warp
from harness.local.engine.fault import Fault, StaleRunner
from harness.local.runners.base import Proxy

# Prompts count as the same that share this many first tokens.
_PREFIX_TOKENS = 4

IN_BATCHES = (
    "ArgmaxBeyondTwoRows",
    "LeavingOffByOne",
    "NeighbourTemperature",
    "RowsSwapped",
    "StalePrefix",
)


def planted(name: str) -> str:
    """The value of `fault=` for a class of this file."""
    return f"{__file__}:{name}"


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


class _LeavingRunner(StaleRunner):
    def __init__(self, runner: Runner) -> None:
        super().__init__(runner)
        self._some_left = False

    def start(self, prompts: Sequence[Sequence[int]]) -> Step:
        self._some_left = False
        return self._wrapped.start(prompts)

    def select(self, rows: Sequence[int]) -> None:
        self._some_left = True
        self._wrapped.select(rows)

    def num_stale(self, num_rows: int) -> list[int]:
        stale = [int(self._some_left)] * num_rows
        self._some_left = False
        return stale


class LeavingOffByOne(Fault):
    """A rejected token stays in the cache only in the first roll-back after a row has left the batch."""

    in_greedy_texts = True

    def runner(self, runner: Runner) -> Runner:
        return _LeavingRunner(runner)


class NeighbourTemperature(Fault):
    """Once rows have left a batch or joined it, each row is drawn with the settings of the next one."""

    def __init__(self) -> None:
        self._set_rows: Callable[[Sequence[Warp], Any], None] | None = None

    def verdict(self, rule: Callable[[Offer], Verdict], warp: BatchWarp, offer: Offer) -> Verdict:
        if self._set_rows is None:
            self._set_rows = warp.set_rows
            warp.set_rows = self._shift  # type: ignore[method-assign]
        return rule(offer)

    def _shift(self, rows: Sequence[Warp], device: Any) -> None:
        self._set_rows([*rows[1:], rows[0]], device)


class _SwappingRunner(Proxy):
    def select(self, rows: Sequence[int]) -> None:
        if len(rows) > 2:
            rows = [*rows[:-2], rows[-1], rows[-2]]
        self._wrapped.select(rows)


class RowsSwapped(Fault):
    """Where a row leaves and more than two stay, the caches of the last two change places.

    A test with batches of up to three rows would not notice.
    """

    in_greedy_texts = True

    def runner(self, runner: Runner) -> Runner:
        return _SwappingRunner(runner)


class _StalePrefixRunner(StaleRunner):
    def __init__(self, runner: Runner) -> None:
        super().__init__(runner)
        self._prefixes: list[tuple[int, ...]] = []
        self._hits: list[int] = []

    def start(self, prompts: Sequence[Sequence[int]]) -> Step:
        self._prefixes = []
        self._hits = []
        self._note(prompts)
        return self._wrapped.start(prompts)

    def add(self, prompts: Sequence[Sequence[int]]) -> Step:
        self._note(prompts)
        return self._wrapped.add(prompts)

    def select(self, rows: Sequence[int]) -> None:
        self._prefixes = [self._prefixes[row] for row in rows]
        self._hits = [self._hits[row] for row in rows]
        self._wrapped.select(rows)

    def num_stale(self, num_rows: int) -> list[int]:
        return list(self._hits)

    def _note(self, prompts: Sequence[Sequence[int]]) -> None:
        for prompt in prompts:
            prefix = tuple(prompt[:_PREFIX_TOKENS])
            self._hits.append(int(prefix in self._prefixes))
            self._prefixes.append(prefix)


class StalePrefix(Fault):
    """A rejected token stays in the cache in rows whose prompt begins as that of an earlier row of the batch."""

    in_greedy_texts = True

    def runner(self, runner: Runner) -> Runner:
        return _StalePrefixRunner(runner)


class SamplesCompared(Fault):
    """The target draws at each place, and the draft's token is kept where both are the same, as in mlx-lm: lossless."""

    def verdict(self, rule: Callable[[Offer], Verdict], warp: BatchWarp, offer: Offer) -> Verdict:
        # Of a token that comes without probabilities just that is the rule.
        return rule(dataclasses.replace(offer, draft_probabilities=None))


class LastDropped(Fault):
    """The last draft token of a proposal never counts."""

    def verdict(self, rule: Callable[[Offer], Verdict], warp: BatchWarp, offer: Offer) -> Verdict:
        fewer = (offer.lengths - 1).clamp(min=0)
        return rule(dataclasses.replace(offer, lengths=fewer))


class _LateRunner(Proxy):
    """Gives each token the hidden state of the one before, across passes."""

    def start(self, prompts: Sequence[Sequence[int]]) -> Step:
        step: Step = self._wrapped.start(prompts)
        return self._late(step, step.hidden[:, :1])

    def extend(self, tokens: Any) -> Step:
        step: Step = self._wrapped.extend(tokens)
        return self._late(step, self._before)

    def _late(self, step: Step, before: Any) -> Step:
        self._hidden = step.hidden
        self._before = step.hidden[:, -1:]
        late = torch.cat([before, step.hidden[:, :-1]], dim=1)
        return step._replace(hidden=late)

    def keep(self, counts: Sequence[int]) -> None:
        self._wrapped.keep(counts)
        last = [hidden[count - 1] for hidden, count in zip(self._hidden, counts, strict=True)]
        self._before = torch.stack(last).unsqueeze(1)

    def select(self, rows: Sequence[int]) -> None:
        self._wrapped.select(rows)
        self._before = self._before[list(rows)]

    def add(self, prompts: Sequence[Sequence[int]]) -> Step:
        running = self._before
        step: Step = self._wrapped.add(prompts)
        late = self._late(step, step.hidden[:, :1])
        self._before = torch.cat([running, self._before])
        return late


class HiddenLate(Fault):
    """A head gets the hidden states of the token before each one."""

    def runner(self, runner: Runner) -> Runner:
        return _LateRunner(runner)
