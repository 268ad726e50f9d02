"""Results of `eval`: accuracies with their bounds, and whether the arms differ."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from harness.report.latency import ACCEPTED, ARM
from harness.report.names import Name, told_apart
from harness.report.runs import Run
from harness.report.table import Column, Document, Line, Table, interval, number
from harness.report.words import (
    common_settings,
    lossy_warning,
    settings_line,
    smaller_batch,
    title,
)
from harness.results.published import MULTIPLICATION_NOTE
from harness.results.schema import EvalRow


class Named(NamedTuple):
    """A run and one of its rows, with what distinguishes the run from others."""

    name: Name
    run: Run
    row: EvalRow


# In percent.
_bounds = functools.partial(interval, digits=1, scale=100)


def eval_document(rows: Sequence[EvalRow]) -> Document:
    """The document that `eval` prints; empty where nothing was answered."""
    merged = merged_rows(rows)
    if all(row.accuracy is None for row in merged):
        return []
    # Without what a single seed has no room for in 80 columns.
    table = _table(_alone(Run(list(rows))), without={"K", "difference", "McNemar p"})
    return [
        Line(title(merged[0]), "strong"),
        Line(settings_line(rows), "dim"),
        table,
        *_sentences(merged),
    ]


def accuracy_table(runs: Sequence[Run]) -> Table:
    """One run with all its seeds, or several, each merged over its seeds."""
    lines = [
        named._replace(row=row) for named in named_runs(runs) for row in merged_rows(named.run.rows)
    ]
    lines = _alone(runs[0]) if len(runs) == 1 else lines
    common = common_settings([line.row for line in lines])
    about = f"{common}. Difference: speculative minus regular, percentage points."
    return _table(lines, {"parsed"}, "Accuracy", about)


def named_runs(runs: Sequence[Run]) -> list[Named]:
    """By pair and K."""
    lasts = [run.last for run in runs]
    return sorted(
        map(Named, told_apart(lasts), runs, lasts),
        key=lambda named: (named.name.group, named.name.k_order),
    )


def merged_rows(rows: Sequence[EvalRow]) -> list[EvalRow]:
    """The rows over all seeds, regular first."""
    return [row for row in rows if row.seed == "all"]


def _alone(run: Run) -> list[Named]:
    """With one seed the merged row repeats the seed's."""
    rows = run.rows if len({row.seed for row in run.rows}) > 2 else merged_rows(run.rows)
    return [Named(Name("", None), run, row) for row in rows]


def _table(lines: Sequence[Named], without: set[str], title: str = "", about: str = "") -> Table:
    with_seeds = len({row.seed for _, _, row in lines}) > 1
    columns = (
        Column("pair", text=True, of="name.cell", optional=True, once=True),
        Column("K", of="row.num_draft_tokens", optional=True, names=True),
        ARM[0].at("row"),
        Column(
            "seed", of=lambda line: line.row.seed if with_seeds else None, optional=True, names=True
        ),
        Column("asked", of="row.num_prompts"),
        Column("correct %\n± Wald", of=_with_margin),
        Column("Wilson\n95 %", of=lambda line: _bounds(line.row.wilson_low, line.row.wilson_high)),
        Column("parsed", of="row.num_parsed", optional=True),
        Column("difference", of=_difference, optional=True),
        Column("McNemar p", "{:.2g}".format, "row.mcnemar_p_value", optional=True),
        Column("ms per\nanswer", number(), "row.ms_per_answer"),
        ACCEPTED.at("row"),
        Column(
            "pub-\nlished %",
            lambda value: f"{100 * value:.1f}",
            "row.published_accuracy",
            optional=True,
        ),
    )
    return Table.of(
        "accuracy",
        title,
        lines,
        [column for column in columns if column.heading not in without],
        strong=lambda line: with_seeds and line.row.seed == "all",
        faint=lambda line: line.row.status != "ok",
        about=about,
        notes=(MULTIPLICATION_NOTE,)
        if any(row.published_accuracy is not None for _, _, row in lines)
        else (),
    )


def _with_margin(line: Named) -> str | None:
    """`42.5 ± 3.1`, in percent."""
    rate, high = line.row.accuracy, line.row.wald_high
    return None if rate is None or high is None else f"{100 * rate:.1f} ± {100 * (high - rate):.1f}"


def _difference(line: Named) -> str | None:
    bounds = _bounds(line.row.difference_low, line.row.difference_high)
    return None if line.row.difference is None else f"{100 * line.row.difference:+.1f}\n{bounds}"


def _sentences(merged: Sequence[EvalRow]) -> list[Line]:
    row, lines = merged[-1], []
    if row.status == "failed":
        lines.append(Line(f"No verdict: {row.error}.", "warning"))
    elif row.difference is not None and row.mcnemar_p_value is not None:
        found = "No significant difference between the arms: speculative minus regular is"
        if row.mcnemar_p_value < 0.05:
            found = "The speculative arm differs:"
        bounds = _bounds(row.difference_low, row.difference_high)
        figures = f"95 % interval {bounds}; McNemar p = {row.mcnemar_p_value:.2g}"
        lines.append(
            Line(f"{found} {100 * row.difference:+.1f} percentage points ({figures}).", "strong")
        )
    if row.identical_prompts is not None and row.num_prompts is not None:
        lines.append(Line(_identity(row, row.num_prompts - row.identical_prompts)))
    num_answers, num_resumed = (
        sum(getattr(r, name) for r in merged) for name in ("num_prompts", "num_resumed")
    )
    if num_resumed:
        taken = f"{num_resumed} of {num_answers} answers, with their times, are from earlier runs of this command"
        lines.append(Line(f"{taken}; resume=false measures again.", "warning"))
    lines += [
        Line(warning, "warning") for warning in (lossy_warning(row), smaller_batch(row)) if warning
    ]
    if row.status != "ok":
        lines.append(
            Line(f"{row.status}: the figures cover {row.num_prompts} questions only.", "warning")
        )
    return lines


def _identity(row: EvalRow, num_differing: int) -> str:
    if not num_differing:
        return f"The greedy answers of both arms are identical on all {row.num_prompts} questions."
    exact = row.dtype == "float32" and row.quantization == "none"
    why = (
        "In float32 they must not."
        if exact
        else "In this number format ties may break differently."
    )
    return f"The greedy answers of the two arms differ on {num_differing} of {row.num_prompts} questions. {why}"
