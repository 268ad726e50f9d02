"""A rejected token stays in the cache only in the first roll-back after a row has left the batch."""

from __future__ import annotations

from collections.abc import Sequence

from harness.decoding.protocols import Runner, Step
from harness.engines.local.fault import Fault
from harness.engines.local.faults.rollback_off_by_one import StaleRunner


class LeavingRunner(StaleRunner):
    def __init__(self, runner: Runner) -> None:
        super().__init__(runner)
        self._some_left = False

    def start(self, prompts: Sequence[Sequence[int]]) -> Step:
        self._some_left = False
        return super().start(prompts)

    def select(self, rows: Sequence[int]) -> None:
        self._some_left = True
        super().select(rows)

    def num_stale(self, num_rows: int) -> list[int]:
        stale = [int(self._some_left)] * num_rows
        self._some_left = False
        return stale


class LeavingOffByOne(Fault):
    in_greedy_texts = True
    fewest_rows = 2

    def runner(self, runner: Runner) -> Runner:
        return LeavingRunner(runner)


RECORD = LeavingOffByOne()
