"""Compares the accuracy before and after a change, over the same questions, for `regress`."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from statistics import fmean

from harness.commands.eval.rows import EvalRow, stored_answers
from harness.reporting.changes import BeforeAndAfter, Compared
from harness.results.judging.change import ACCURACY
from harness.results.runs import Run
from harness.results.statistics.comparisons import compare_proportions


def change_of_accuracy(sides: BeforeAndAfter[EvalRow]) -> Compared:
    """Compare the accuracy over the questions that both sides were asked."""
    all_before = _correct_by_question(sides.before)
    all_after = _correct_by_question(sides.after)
    if not all_before or not all_after:
        return sides.compared(ACCURACY, why="the answers of one side cannot be found")
    # In the same order on both sides.
    questions = [*(all_before.keys() & all_after.keys())]
    if not questions:
        return sides.compared(ACCURACY, why="no question was answered on both sides")
    before = [all_before[question] for question in questions]
    after = [all_after[question] for question in questions]
    compared = sides.compared(ACCURACY, compare_proportions(before, after))
    return replace(compared, mean_before=fmean(before), mean_after=fmean(after))


def _correct_by_question(runs: Sequence[Run[EvalRow]]) -> dict[Hashable, bool]:
    """Whether each answer of the draft's arm, or of the only arm, was correct.

    Greedy answers to the same operands are copies and count once; sampled answers are told apart by seed and index.
    """
    correct: dict[Hashable, bool] = {}
    for run in runs:
        if run.directory is None:
            continue
        is_greedy = run.last.temperature == 0
        for answer in stored_answers(run.directory / "eval_prompts.csv"):
            # The last row is the draft's, if there is one.
            if answer.arm == run.last.arm:
                key = (answer.a, answer.b) if is_greedy else (answer.seed, answer.prompt_index)
                correct[key] = answer.correct
    return correct
