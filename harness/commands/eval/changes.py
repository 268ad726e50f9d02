"""How accuracies differ on the same questions: before and after a change, for `regress`, and along a sweep."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from statistics import fmean

from harness.commands.eval.rows import EvalRow, read_answers
from harness.config.amounts import counted
from harness.reporting.changes import Compared, Figure, Sides
from harness.reporting.table import Line
from harness.reporting.words import called, in_words
from harness.results.runs import Run, grouped
from harness.results.statistics.comparisons import compare_proportions

_ACCURACY = Figure("accuracy", "higher", ("higher", "lower"), is_share=True)
# Settings on which the answers of the regular arm depend, beside the questions.
_REGULAR_SETTINGS = (
    "model",
    "repository",
    "quantization",
    "dtype",
    "engine",
    "server",
    "temperature",
    "top_k",
    "top_p",
)


def change_of_accuracy(sides: Sides[EvalRow]) -> Compared:
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


def contrasts(runs: Sequence[Run]) -> Iterator[Line]:
    """Sentences on how the accuracies of the regular arms of a sweep differ from that of the first one, on the same
    questions: of the full-precision target, where others are quantized.
    """
    measured = [run for run in runs if run.status == "ok" and run.row("regular") is not None]
    for of_task in grouped(measured, lambda run: (run.last.task, run.last.operands)).values():
        targets = [same[0] for same in grouped(of_task, _regular_settings).values()]
        # Stable: in the order of the sweep.
        reference, *others = sorted(targets, key=lambda run: run.last.quantization != "none")
        for run in others:
            both = (run, reference)
            by_question = all(each.last.temperature == 0 for each in both)
            correct, expected = (_answered(each, by_question, "regular") for each in both)
            questions = [question for question in correct if question in expected]
            if not questions:
                continue
            change = compare_proportions(
                [expected[question] for question in questions],
                [correct[question] for question in questions],
                margin=0.0,
            ).change
            points = f"{100 * change.estimate:+.1f} points"
            if not change.excludes(0):
                points = f"no significant difference, {points}"
            asked = counted(len(questions), "question")
            more = f"95 % interval {change.bounds('.1%')}, on the same {asked}"
            yield Line(f"{' against '.join(_names(*both))}, regular: {points}", "strong", more)


def _regular_settings(run: Run) -> tuple[Hashable, ...]:
    return tuple(getattr(run.last, column) for column in _REGULAR_SETTINGS)


def _names(*runs: Run) -> tuple[str, str]:
    """Names of two runs by the settings in which their regular arms differ: `tiny_4bit` and `tiny`."""
    first, second = (run.last for run in runs)
    if first.model != second.model:
        return called(first.model or ""), called(second.model or "")
    differing = [
        name for name in _REGULAR_SETTINGS if getattr(first, name) != getattr(second, name)
    ]
    words = [
        ", ".join(in_words(row, name) or f"{name} {getattr(row, name)}" for name in differing)
        for row in (first, second)
    ]
    return words[0], words[1]


def _correct(runs: Sequence[Run]) -> dict[Hashable, bool]:
    """Whether the draft's arm, or the only one, was correct, by question.

    Greedy answers to the same question are copies.
    """
    correct: dict[Hashable, bool] = {}
    for run in runs:
        correct |= _answered(run, run.last.temperature == 0, run.last.arm)
    return correct


def _answered(run: Run, by_question: bool, arm: str) -> dict[Hashable, bool]:
    """Whether an arm was correct, by the question itself or else by its seed and index."""
    if run.directory is None:
        return {}
    correct: dict[Hashable, bool] = {}
    for answer in read_answers(run.directory / "eval_prompts.csv"):
        if answer.arm == arm:
            drawn = (answer.seed, answer.prompt_index)
            question = (answer.a, answer.b, answer.source_row)
            correct[question if by_question else drawn] = answer.correct
    return correct
