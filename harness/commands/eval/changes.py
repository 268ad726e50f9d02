"""How the accuracy of a measurement changed, for `regress`."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from statistics import fmean

from harness.commands.eval.rows import read_answers
from harness.reporting.changes import Compared, Figure, Sides
from harness.results.runs import Run
from harness.results.statistics.comparisons import compare_proportions

_ACCURACY = Figure("accuracy", "higher", ("higher", "lower"), is_share=True)


def change_of_accuracy(sides: Sides) -> Compared:
    """The accuracy of `eval` over the questions that both sides were asked."""
    compared = sides.compared(_ACCURACY)
    correct_before = _correct(sides.before)
    correct_after = _correct(sides.after)
    questions = [question for question in correct_before if question in correct_after]
    if not questions:
        return replace(compared, reason="no question was answered on both sides")
    before = [correct_before[question] for question in questions]
    after = [correct_after[question] for question in questions]
    comparison = compare_proportions(before, after, sides.margin)
    return replace(
        compared,
        comparison=comparison,
        mean_before=fmean(before),
        mean_after=fmean(after),
        verdict=comparison.verdict,
    )


def _correct(runs: Sequence[Run]) -> dict[Hashable, bool]:
    """Whether the draft's arm, or the only one, was correct, by (seed, index) of the question.

    Greedy answers to the same question are copies: by the question itself.
    """
    correct: dict[Hashable, bool] = {}
    for run in runs:
        if run.directory is None:
            continue
        is_greedy = run.last.temperature == 0
        for answer in read_answers(run.directory / "eval_prompts.csv"):
            if answer.arm == run.last.arm:
                drawn = (answer.seed, answer.prompt_index)
                question = (answer.a, answer.b, answer.source_row)
                correct[question if is_greedy else drawn] = answer.correct
    return correct
