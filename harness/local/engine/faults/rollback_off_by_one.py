"""One token too many is kept after a rejection: the rejected token stays in the cache, stale."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from harness.local.decoding.protocols import Runner, Step
from harness.local.engine.fault import Fault
from harness.local.runners.base import Wrapped


class StaleRunner(Wrapped):
    """Keeps `num_stale` rejected tokens of each row."""

    def __init__(self, runner: Runner) -> None:
        super().__init__(runner)
        self._num_extended = 0

    def num_stale(self, num_rows: int) -> list[int]:
        """How many rejected tokens each row keeps in this roll-back."""
        return [1] * num_rows

    def extend(self, tokens: Tensor) -> Step:
        self._num_extended += tokens.shape[1]
        return self._wrapped.extend(tokens)

    def decide(self, tokens: Tensor, decision: Callable[[Tensor], Any]) -> tuple[Step, Any]:
        self._num_extended += tokens.shape[1]
        return self._wrapped.decide(tokens, decision)

    def keep(self, counts: Sequence[int]) -> None:
        stale = self.num_stale(len(counts))
        # No more than the runner was extended by.
        too_many = [
            min(count + more, self._num_extended) for count, more in zip(counts, stale, strict=True)
        ]
        self._wrapped.keep(too_many)
        self._num_extended = 0


class RollbackOffByOne(Fault):
    in_greedy_texts = True

    def runner(self, runner: Runner) -> Runner:
        return StaleRunner(runner)


RECORD = RollbackOffByOne()
