"""What is said of the accuracy of two arms on the same questions."""

from __future__ import annotations

import math

import pytest

from harness.commands.eval.rows import EvalRow
from harness.results.judging.change import judged_differences
from harness.results.statistics.interval import Interval
from harness.results.statistics.proportions import (
    difference_of_paired_proportions,
    p_value_of_difference,
)


def test_an_arm_is_better_or_worse_where_the_interval_excludes_no_difference() -> None:
    answers = [True] * 80 + [False] * 20
    lost = [True] * 60 + [False] * 40
    for before, after, words in (
        (answers, answers, "no significant difference"),
        (answers[:40], answers[:40], "cannot tell"),
        (answers, lost, "worse"),
        (lost, answers, "better"),
        ([True] * 5, [True] * 5, "cannot tell"),
    ):
        row = EvalRow(difference=difference_of_paired_proportions(before, after))
        (statement,) = judged_differences([row])
        assert statement.words == words


def test_five_answers_lost_of_a_hundred_are_worse_alone_but_not_among_four() -> None:
    """Interval and p-value are one test: McNemar's p-value, 0.06, contradicts the interval here."""
    before, after = [True] * 98 + [False] * 2, [False] * 5 + [True] * 93 + [False] * 2
    lost = EvalRow(difference=difference_of_paired_proportions(before, after))
    same = EvalRow(difference=difference_of_paired_proportions([True] * 100, [True] * 100))
    assert lost.difference is not None
    assert lost.difference.high < 0
    (alone,) = judged_differences([lost])
    assert (alone.words, alone.family) == ("worse", 1)
    among, *_ = judged_differences([lost, same, same, same])
    assert (among.words, among.family) == ("cannot tell", 4)
    assert among.why == "not significant among 4 comparisons"
    assert among.interval == alone.interval


@pytest.mark.parametrize("low", [1e-9, -1e-9])
def test_a_p_value_is_below_5_percent_where_the_interval_excludes_0(low: float) -> None:
    assert (p_value_of_difference(Interval(0.1, low, 0.4)) < 0.05) == (low > 0)
    assert (p_value_of_difference(Interval(-0.1, -0.4, -low)) < 0.05) == (low > 0)
    assert math.isnan(p_value_of_difference(Interval()))
    assert p_value_of_difference(Interval(0.1, 0.1, 0.1)) == 0


def test_evaluations_that_are_read_together_are_one_family() -> None:
    lost = EvalRow(run="a", difference=Interval(-0.05, -0.11, -0.001))
    same = EvalRow(run="b", difference=Interval(0.0, -0.05, 0.05))
    alone_arm, failed = EvalRow(run="c"), EvalRow(run="d", status="failed", error="no server")
    (alone,) = judged_differences([lost])
    assert (alone.words, alone.subject.run, alone.figure) == ("worse", "a", "accuracy")
    together = judged_differences([lost, same, alone_arm, failed])
    assert [(statement.relation, statement.family) for statement in together] == [("open", 2)] * 4
    assert [statement.why for statement in together] == [
        "not significant among 2 comparisons",
        "",
        "only one arm answered",
        "no server",
    ]
