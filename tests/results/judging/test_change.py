"""What is said of a figure before a change and after it, and of two arms on the same questions."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import pytest
from scipy import stats

from harness.commands.eval.rows import EvalRow
from harness.results.judging.change import (
    ACCURACY,
    Figure,
    judged_change,
    judged_differences,
    judged_together,
)
from harness.results.statistics.comparisons import Comparison, compare, compare_proportions
from harness.results.statistics.interval import Interval
from harness.results.statistics.proportions import (
    difference_of_paired_proportions,
    p_value_of_difference,
)


def relation(
    comparison: Comparison, better: Literal["lower", "higher"] = "lower", margin: float = 0.02
) -> str:
    return judged_change(Figure("a figure", better, ("up", "down")), comparison, margin).words


def accuracy(comparison: Comparison, margin: float | None = None) -> str:
    return judged_change(ACCURACY, comparison, margin).words


def test_a_lower_figure_is_better_or_worse() -> None:
    rng = np.random.default_rng(0)
    before = rng.lognormal(0, 0.3, 20)
    lower = before * 0.9 * np.exp(rng.normal(0, 0.01, 20))
    changed = compare(before, lower)
    assert relation(changed) == "better"
    assert relation(changed, "higher") == "worse"
    assert relation(changed, "higher", margin=0.15) == "no worse"
    assert relation(compare(lower, before), "higher") == "better"
    unchanged = compare(before, before)
    for better in ("lower", "higher"):
        assert relation(unchanged, better, margin=0.0) == "cannot tell"
    assert relation(unchanged, margin=0.01) == "no worse"
    few = compare(before[:7], lower[:7])
    assert relation(few) == "cannot tell"
    assert few.change.estimate == pytest.approx(0.9, abs=0.02)


def test_proportions_of_the_same_questions() -> None:
    answers = [True] * 80 + [False] * 20
    assert accuracy(compare_proportions(answers, answers), 0.05) == "no worse"
    assert accuracy(compare_proportions(answers, answers)) == "cannot tell"
    lost = [True] * 60 + [False] * 40
    assert accuracy(compare_proportions(answers, lost), 0.05) == "worse"
    assert accuracy(compare_proportions(lost, answers), 0.05) == "better"
    few = compare_proportions([True] * 5, [True] * 5)
    assert accuracy(few, 0.05) == "cannot tell"
    assert few.p_value == 1
    assert accuracy(compare_proportions(answers, lost), 0.0) == "worse"


@pytest.mark.parametrize(("further", "expected"), [(1e-9, "no worse"), (-1e-9, "cannot tell")])
def test_no_worse_is_one_sided_at_5_percent(further: float, expected: str) -> None:
    before, after = [True] * 80 + [False] * 20, [True] * 79 + [False] * 20 + [True]
    lowest = difference_of_paired_proportions(before, after, confidence=0.9).low
    assert accuracy(compare_proportions(before, after), further - lowest) == expected
    times = np.exp(np.random.default_rng(0).normal(0, 0.05, 20))
    mean, error = np.log(times).mean(), stats.sem(np.log(times))
    highest = math.exp(stats.t.ppf(0.95, 19, mean, error))
    lower = relation(compare(np.ones(20), times), margin=highest - 1 + further)
    rest = 1 - 1 / highest + further
    higher = relation(compare(np.ones(20), 1 / times), "higher", margin=rest)
    assert (lower, higher) == (expected, expected)


def test_five_answers_lost_of_a_hundred_are_worse_alone_but_not_among_four() -> None:
    """Interval and p-value are one test: McNemar's p-value, 0.06, contradicts the interval here."""
    lost = compare_proportions([True] * 98 + [False] * 2, [False] * 5 + [True] * 93 + [False] * 2)
    assert lost.change.high < 0
    (alone,) = judged_together([judged_change(ACCURACY, lost)], [lost.p_value])
    assert (alone.words, alone.family) == ("worse", 1)
    same = compare_proportions([True] * 100, [True] * 100)
    comparisons = [lost, same, same, same]
    statements = [judged_change(ACCURACY, comparison) for comparison in comparisons]
    among, *_ = judged_together(statements, [comparison.p_value for comparison in comparisons])
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
