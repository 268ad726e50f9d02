"""What a cell of `speedup_covers` says."""

from __future__ import annotations

import pytest

from harness.results.statistics.interval import SAME_TEXTS, Coverage, Interval


@pytest.mark.parametrize(
    ("text", "coverage"),
    [
        (None, None),
        ("", None),
        ("1 batch", Coverage("batch", 1)),
        ("12 batches", Coverage("batch", 12)),
        ("15 prompts and 5 runs with a seed each", Coverage("prompt", 15, num_runs=5)),
        (f"8 laps{SAME_TEXTS}", Coverage("lap", 8, same_texts=True)),
    ],
)
def test_a_cell_is_read_back(text: str | None, coverage: Coverage | None) -> None:
    assert Coverage.of(Interval(2.0, covers=text or "")) == coverage
