"""How accuracies differ on the same questions: before and after a change, for `regress`, and along a sweep."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from harness.commands.eval.rows import EvalRow, read_answers
from harness.config.amounts import counted
from harness.reporting.changes import Compared, Figure, Sides
from harness.reporting.names import distinct_names
from harness.reporting.table import Line
from harness.reporting.words import called
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
    before, after = _shared(_correct(sides.before), _correct(sides.after))
    if not before:
        return replace(compared, reason="no question was answered on both sides")
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
        targets.sort(key=lambda run: run.last.quantization != "none")
        models = [called(str(run.last.model)) for run in targets]
        names = []
        for model, among in zip(models, distinct_names([run.last for run in targets]), strict=True):
            settings = among.settings.values() if models.count(model) > 1 else ()
            names.append(", ".join([model, *settings]))
        reference = targets[0]
        for run, name in zip(targets[1:], names[1:], strict=True):
            by_question = run.last.temperature == reference.last.temperature == 0
            expected, correct = _shared(
                _answered(reference, by_question, "regular"), _answered(run, by_question, "regular")
            )
            if not correct:
                continue
            change = compare_proportions(expected, correct, margin=0.0).change
            points = f"{100 * change.estimate:+.1f} points"
            if not change.excludes(0):
                points = f"no significant difference, {points}"
            asked = counted(len(correct), "question")
            more = f"95 % interval {change.bounds('.1%')}, on the same {asked}"
            yield Line(f"{name} against {names[0]}, regular: {points}", "strong", more)


def _regular_settings(run: Run) -> tuple[Hashable, ...]:
    return tuple(getattr(run.last, column) for column in _REGULAR_SETTINGS)


def _shared(
    before: Mapping[Hashable, bool], after: Mapping[Hashable, bool]
) -> tuple[list[bool], list[bool]]:
    """Whether each question that both have was answered correctly."""
    questions = [question for question in before if question in after]
    return [before[question] for question in questions], [after[question] for question in questions]


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
