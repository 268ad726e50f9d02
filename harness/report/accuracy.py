"""What `eval` found: accuracies with their bounds, and whether the arms differ."""

from __future__ import annotations

from collections.abc import Sequence

from harness.report.runs import Run
from harness.report.table import Column, Document, Line, Table, interval, number, percent
from harness.report.words import (
    Name,
    arm_name,
    common_settings,
    lossy_warning,
    settings_line,
    smaller_batch,
    title,
    told_apart,
)
from harness.results.published import MULTIPLICATION_NOTE
from harness.results.schema import EvalRow

# A row with the name of its run, None for a run alone.
_Named = tuple[Name | None, EvalRow]


def eval_document(rows: Sequence[EvalRow]) -> Document:
    """What `eval` prints of its own run; empty where nothing was answered."""
    merged = merged_rows(rows)
    if all(row.accuracy is None for row in merged):
        return []
    # Without what a single seed has no room for in 80 columns.
    table = _table([(None, row) for row in _of_one_run(rows)], without={"K", "difference", "McNemar p"})
    return [Line(title(merged[0]), "strong"), Line(settings_line(rows), "dim"), table, *_sentences(merged)]


def accuracy_tables(runs: Sequence[Run]) -> list[Table]:
    """One run with all its seeds, or several, each merged over its seeds; [] without runs."""
    lines: list[_Named] = [(name, row) for name, run in named_runs(runs) for row in merged_rows(run.rows)]
    if len(runs) == 1:
        lines = [(None, row) for row in _of_one_run(runs[0].rows)]
    about = f"{common_settings([row for _, row in lines])}. Difference: speculative minus regular, percentage points."
    return [_table(lines, {"parsed"}, "Accuracy", about)] if lines else []


def named_runs(runs: Sequence[Run]) -> list[tuple[Name, Run]]:
    """Runs with what distinguishes them, by pair and K."""
    named = zip(told_apart([run.last for run in runs]), runs, strict=True)
    return sorted(named, key=lambda item: (item[0].group, item[0].place))


def merged_rows(rows: Sequence[EvalRow]) -> list[EvalRow]:
    """The rows over all seeds, regular first."""
    return [row for row in rows if row.seed == "all"]


def _of_one_run(rows: Sequence[EvalRow]) -> Sequence[EvalRow]:
    """With one seed the merged row repeats the seed's."""
    return rows if len({row.seed for row in rows}) > 2 else merged_rows(rows)


def _table(lines: Sequence[_Named], without: set[str], title: str = "", about: str = "") -> Table:
    with_seeds = len({row.seed for _, row in lines}) > 1
    columns = (
        Column("pair", text=True, of=lambda line: line[0] and line[0].cell, optional=True, once=True),
        Column("K", of=lambda line: line[1].num_draft_tokens, optional=True),
        Column("arm", text=True, of=lambda line: arm_name(line[1])),
        Column("seed", of=lambda line: line[1].seed if with_seeds else None, optional=True),
        Column("asked", of=lambda line: line[1].num_prompts),
        Column("correct %\n± Wald", of=lambda line: _with_margin(line[1].accuracy, line[1].wald_high)),
        Column("Wilson\n95 %", of=lambda line: _percents(line[1].wilson_low, line[1].wilson_high)),
        Column("parsed", of=lambda line: line[1].num_parsed, optional=True),
        Column("difference", of=lambda line: _difference(line[1]), optional=True),
        Column("McNemar p", "{:.2g}".format, lambda line: line[1].mcnemar_p_value, optional=True),
        Column("ms per\nanswer", number(), lambda line: line[1].ms_per_answer),
        Column("accepted", percent, lambda line: line[1].acceptance_rate),
        Column("pub-\nlished %", _published, lambda line: line[1].published_accuracy, optional=True),
    )
    return Table.of(
        "accuracy",
        title,
        lines,
        [column for column in columns if column.heading not in without],
        strong=lambda line: with_seeds and line[1].seed == "all",
        faint=lambda line: line[1].status != "ok",
        about=about,
        notes=(MULTIPLICATION_NOTE,) if any(row.published_accuracy is not None for _, row in lines) else (),
    )


def _published(value: float) -> str:
    return f"{100 * value:.1f}"


def _with_margin(estimate: float | None, high: float | None) -> str | None:
    """`42.5 ± 3.1`, in percent."""
    return None if estimate is None or high is None else f"{100 * estimate:.1f} ± {100 * (high - estimate):.1f}"


def _difference(row: EvalRow) -> str | None:
    bounds = _percents(row.difference_low, row.difference_high)
    return None if row.difference is None else f"{100 * row.difference:+.1f}\n{bounds}"


def _percents(low: float | None, high: float | None) -> str | None:
    return None if low is None or high is None else interval(100 * low, 100 * high, digits=1)


def _sentences(merged: Sequence[EvalRow]) -> list[Line]:
    row, lines = merged[-1], []
    if row.difference is not None and row.mcnemar_p_value is not None:
        found = "No significant difference between the arms: speculative minus regular is"
        if row.mcnemar_p_value < 0.05:
            found = "The speculative arm differs:"
        bounds = _percents(row.difference_low, row.difference_high)
        figures = f"95 % interval {bounds}; McNemar p = {row.mcnemar_p_value:.2g}"
        lines.append(Line(f"{found} {100 * row.difference:+.1f} percentage points ({figures}).", "strong"))
    if row.identical_prompts is not None and row.num_prompts is not None:
        lines.append(Line(_identity(row, row.num_prompts - row.identical_prompts)))
    num_answers, num_resumed = (sum(getattr(r, name) for r in merged) for name in ("num_prompts", "num_resumed"))
    if num_resumed:
        taken = f"{num_resumed} of {num_answers} answers, with their times, are from earlier runs of this command"
        lines.append(Line(f"{taken}; resume=false measures again.", "warning"))
    lines += [Line(warning, "warning") for warning in (lossy_warning(row), smaller_batch(row)) if warning]
    if row.status != "ok":
        lines.append(Line(f"{row.status}: the figures cover {row.num_prompts} questions only.", "warning"))
    return lines


def _identity(row: EvalRow, num_differing: int) -> str:
    if not num_differing:
        return f"The greedy answers of both arms are identical on all {row.num_prompts} questions."
    exact = row.dtype == "float32" and row.quantization == "none"
    why = "In float32 they must not." if exact else "In this number format ties may break differently."
    return f"The greedy answers of the two arms differ on {num_differing} of {row.num_prompts} questions. {why}"
