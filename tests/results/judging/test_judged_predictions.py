"""What is said of predictions at one load."""

from __future__ import annotations

from typing import Any

import pytest

from harness.commands.plan.rows import PlanRow
from harness.results.judging.predictions import highest_prediction, judged_predictions
from harness.results.statistics.interval import Coverage, Interval

COVERS = Coverage(15, "prompt")


def row(k: int, speedup: float, spread: float | None = 0.02, **columns: Any) -> PlanRow:
    bounds = () if spread is None else (speedup * (1 - spread), speedup * (1 + spread), COVERS)
    columns = {"draft": "d", "batch_size": 1} | columns
    return PlanRow(num_draft_tokens=k, predicted_speedup=Interval(speedup, *bounds), **columns)


def test_every_k_of_a_load_is_compared_with_the_highest_in_bounds() -> None:
    (statements,) = judged_predictions([row(1, 1.2), row(2, 1.9), row(4, 1.91), row(8, 1.5)])
    best, *others = statements
    assert (best.words, best.subject.num_draft_tokens, best.reference) == ("faster", 4, None)
    assert [(other.subject.num_draft_tokens, other.words) for other in others] == [
        (1, "gains less"),
        (2, "cannot be told apart"),
        (8, "gains less"),
    ]
    assert {statement.family for statement in statements} == {4}
    assert all(other.interval.has_bounds and other.reference is best.subject for other in others)


@pytest.mark.parametrize("share", [None, Interval(0.8, 0.75, 0.85, COVERS)])
def test_a_regular_step_that_k_share_moves_none_against_another(share: Interval | None) -> None:
    """It is known to 30 %, and the decoding speeds to a few per cent."""
    rows = [row(2, 1.6, 0.3, relative_to_best=share), row(4, 2.0, 0.3)]
    ((_, second),) = judged_predictions(rows)
    assert second.words == ("cannot be told apart" if share is None else "gains less")
    # Another draft has other regular steps.
    rows[0] = row(2, 1.6, 0.3, relative_to_best=share, draft="e")
    ((_, second),) = judged_predictions(rows)
    assert second.words == "cannot be told apart"


def test_without_intervals_nothing_is_concluded() -> None:
    (statements,) = judged_predictions([row(1, 0.734, None), row(2, 0.5, None)])
    assert [(statement.relation, statement.why) for statement in statements] == [
        ("open", "no interval")
    ] * 2


def test_a_row_without_a_prediction_is_not_the_highest() -> None:
    rows = [PlanRow(draft="d", batch_size=1, num_draft_tokens=1), row(2, 0.9), row(4, 0.8)]
    assert highest_prediction(rows) is rows[1]
    ((best, unknown, less),) = judged_predictions(rows)
    assert (best.subject, best.words) == (rows[1], "slower")
    assert (unknown.words, unknown.why) == ("not ranked", "no interval")
    assert less.words == "gains less"


def test_loads_are_judged_apart() -> None:
    rows = [row(4, 2.0), row(4, 0.8, batch_size=16), row(2, 0.6, batch_size=16)]
    one, many = judged_predictions(rows)
    assert [statement.words for statement in one] == ["faster"]
    assert [statement.words for statement in many] == ["slower", "gains less"]
