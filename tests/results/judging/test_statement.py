"""What the interval of a comparison says, by itself."""

from __future__ import annotations

import math

import pytest

from harness.results.judging.statement import Statement
from harness.results.statistics.interval import Interval


@pytest.mark.parametrize(
    ("low", "high", "relation", "words"),
    [
        (1.1, 1.4, "above", "gains more"),
        (0.9, 1.2, "open", "cannot be told apart"),
        (1.0, 1.2, "open", "cannot be told apart"),
        (1 + 1e-15, 1 + 1e-15, "open", "cannot be told apart"),
        (0.8, 0.8, "below", "gains less"),
        (0.7, 0.9, "below", "gains less"),
        (math.nan, math.nan, "open", "not ranked"),
    ],
)
def test_the_interval_of_two_speedups_decides(
    low: float, high: float, relation: str, words: str
) -> None:
    statement = Statement.ordered("compared", Interval((low + high) / 2, low, high))
    assert (statement.relation, statement.words) == (relation, words)
    assert bool(statement.why) == math.isnan(low)


def test_a_reason_leaves_it_open_whatever_the_interval_is() -> None:
    statement = Statement.ordered("pays", Interval(2.0, 1.5, 2.5), "unequal work")
    assert (statement.relation, statement.words) == ("open", "cannot tell")
    assert statement.as_json()["why"] == "unequal work"
    assert Statement.ordered("pays", Interval(2.0, 1.5, 2.5)).as_json()["why"] is None
    founded = Statement("lossless", "lossless", evidence="15 of 15")
    assert (founded.reason, founded.as_json()["evidence"]) == ("15 of 15", "15 of 15")
    assert Statement.ordered("pays", Interval()).as_json()["evidence"] is None


@pytest.mark.parametrize(
    ("interval", "why"), [(Interval(2.0), ""), (Interval(), ""), (Interval(2.0, 1.5, 2.5), "busy")]
)
def test_no_conclusion_stands_without_bounds_or_against_a_reason(
    interval: Interval, why: str
) -> None:
    with pytest.raises(ValueError, match="without bounds or evidence"):
        Statement("pays", "above", interval, why)
    assert Statement("lossless", "lossless", evidence="15 of 15 texts identical").is_conclusion
