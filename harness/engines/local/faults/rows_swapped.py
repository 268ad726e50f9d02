"""Where a row leaves and more than two stay, the caches of the last two change places. A test with batches of up to
three rows would not notice.
"""

from __future__ import annotations

from collections.abc import Sequence

from harness.decoding.protocols import Runner
from harness.engines.local.fault import Fault
from harness.runners.wrapped import WrappedRunner


class SwappingRunner(WrappedRunner):
    def select(self, rows: Sequence[int]) -> None:
        if len(rows) > 2:
            rows = [*rows[:-2], rows[-1], rows[-2]]
        super().select(rows)


class RowsSwapped(Fault):
    in_greedy_texts = True
    fewest_rows = 4

    def runner(self, runner: Runner) -> Runner:
        return SwappingRunner(runner)


RECORD = RowsSwapped()
