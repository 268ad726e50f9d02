from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.local.engine import stopwatches
from harness.local.engine.stopwatches import pass_ms, pass_widths


@pytest.mark.parametrize(
    ("number", "widths"), [(1, [1, 2]), (2, [1, 2, 3]), (4, [1, 2, 3, 5]), (6, [1, 2, 3, 5, 7])]
)
def test_widths_end_with_the_verification(number: int, widths: list[int]) -> None:
    assert pass_widths(number) == widths


class Slow:
    """A runner whose pass over n tokens takes n² seconds, the first of each width ten times as long."""

    def __init__(self) -> None:
        self.now = 0.0
        self.seen: set[int] = set()
        self.extended = 0

    def start(self, prompts: Sequence[Sequence[int]]) -> Any:
        return SimpleNamespace(logits=torch.zeros(len(prompts), 3))

    def extend(self, tokens: torch.Tensor) -> None:
        width = tokens.shape[1]
        self.now += width**2 * (1 if width in self.seen else 10)
        self.seen.add(width)
        self.extended += width

    def keep(self, counts: Sequence[int]) -> None:
        assert set(counts) == {0}


def test_passes_are_timed_by_their_width(monkeypatch: pytest.MonkeyPatch) -> None:
    runner: Any = Slow()
    monkeypatch.setattr(stopwatches.time, "perf_counter", lambda: runner.now)
    assert pass_ms(runner, [[1, 2], [3]], [1, 2, 4], ()) == [1000, 4000, None, 16000]
