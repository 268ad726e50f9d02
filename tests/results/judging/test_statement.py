"""What the interval of a comparison says, by itself."""

from __future__ import annotations

import pytest

from harness.results.judging.statement import Statement, standing
from harness.results.statistics.interval import Interval


@pytest.mark.parametrize(
    ("low", "high", "relation"),
    [
        (1.1, 1.4, "gains more"),
        (0.9, 1.2, "as good"),
        (1.0, 1.2, "as good"),
        (0.7, 0.9, "gains less"),
    ],
)
def test_the_interval_of_two_speedups_decides(low: float, high: float, relation: str) -> None:
    assert standing(Interval((low + high) / 2, low, high)) == relation


def test_a_reason_is_written_where_there_is_one() -> None:
    assert Statement("no verdict", why="unequal work").as_json()["why"] == "unequal work"
    assert Statement("no verdict").as_json()["why"] is None
