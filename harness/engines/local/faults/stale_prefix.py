"""A rejected token stays in the cache in rows whose prompt begins as that of an earlier row of the batch."""

from __future__ import annotations

from collections.abc import Sequence

from harness.decoding.protocols import Runner, Step
from harness.engines.local.fault import Fault
from harness.engines.local.faults.rollback_off_by_one import StaleRunner

# Prompts count as the same that share this many first tokens.
_PREFIX_TOKENS = 4


class StalePrefixRunner(StaleRunner):
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

    def num_stale(self, num_rows: int) -> list[int]:
        return list(self._hits)

    def _note(self, prompts: Sequence[Sequence[int]]) -> None:
        for prompt in prompts:
            prefix = tuple(prompt[:_PREFIX_TOKENS])
            self._hits.append(int(prefix in self._prefixes))
            self._prefixes.append(prefix)


class StalePrefix(Fault):
    in_greedy_texts = True
    fewest_rows = 2

    def runner(self, runner: Runner) -> Runner:
        return StalePrefixRunner(runner)


RECORD = StalePrefix()
