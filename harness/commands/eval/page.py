"""The page of `eval`: accuracies with their bounds, and whether the arms differ."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from harness.commands.eval.record import MOST_QUESTIONS
from harness.commands.eval.rows import EvalRow
from harness.config.amounts import counted
from harness.reporting.names import Named, named_runs
from harness.reporting.page import (
    NextStep,
    Page,
    figures_table,
    heading,
    lossless_again,
    title_of_many,
)
from harness.reporting.table import (
    Column,
    Line,
    Table,
    number,
    share,
    style_of,
)
from harness.reporting.words import (
    arm_name,
    k_in_words,
    lossy_warning,
    settings_line,
    typed_again,
)
from harness.results.judging.answers import MARGIN, judged_differences, rows_over_all_seeds
from harness.results.judging.statement import Statement
from harness.results.published import MULTIPLICATION_NOTE
from harness.results.runs import Run
from harness.results.statistics.interval import Interval

# If half of the interval is as wide as the margin, the page suggests this many times as many questions. In 80 % of runs
# with equal arms, the interval then excludes a difference of the margin. This needs a factor of
# ((1.96 + 1.28) / 1.96)^2 = 2.7; it is a little larger here, because the width is only an estimate.
_SUGGESTED_GROWTH = 3.0
# At least this many times as many questions as were asked are suggested, if there are so many. Fewer would rarely
# change a result.
_LEAST_GROWTH = 2.0


# Settings to leave out of a suggested `recovery` command: `recovery` lacks them, or they are about questions.
_OWN_SETTINGS = ("operands", "replacement", "seeds", "margin", "num_prompts")


def eval_page(runs: Sequence[Run[EvalRow]]) -> Page | None:
    """The page that says whether the arms differ, in one run or in each of many; None if nothing was answered."""
    # A damaged file may have only rows of single seeds.
    measured = [
        run for run in runs if any(row.has_figures for row in rows_over_all_seeds(run.rows))
    ]
    if not measured:
        return None
    named = named_runs(measured)
    rows = [rows_over_all_seeds(member.run.rows)[-1] for member in named]
    statements = judged_differences(rows)
    labels = [f"{member.name.label()}: " if len(named) > 1 else "" for member in named]
    tables = [accuracy_table(named, statements)]
    # The steps of runs with a significant difference come first, because these differences need an explanation.
    order = sorted(range(len(named)), key=lambda i: not statements[i].is_conclusion)
    steps = [step for i in order for step in _next_steps(named[i].run.rows, statements[i])]
    title = title_of_many([run.last for run in measured])
    if len(named) == 1:
        run = measured[0]
        merged = rows_over_all_seeds(run.rows)
        tables.append(figures_table(merged, arm_name, [*_notes(merged)]))
        title = heading(rows[0], settings_line(run.rows))
    return Page(
        title,
        finding=[
            replace(finding, text=f"{label}{finding.text}")
            for label, finding in zip(labels, map(_finding, rows, statements), strict=True)
        ],
        doubts=[
            f"{label}{doubt}"
            for label, row in zip(labels, rows, strict=True)
            for doubt in _doubts(row)
        ],
        tables=tables,
        next=steps[:1],
        statements=statements,
    )


def _finding(row: EvalRow, statement: Statement) -> Line:
    """`no significant difference: +1.0 points`, `less accurate by 2.1 points`."""
    if row.status == "failed":
        return Line("no verdict", "warning", statement.why)
    if row.difference is None:
        # If a question is asked again, its greedy answer is a copy, which does not count.
        num_asked = row.num_prompts if row.temperature else row.num_different_prompts
        asked = f"95 % interval {_wilson(row)}, over {counted(num_asked or 0, 'question')}"
        return Line(f"{_percent(row.accuracy or 0)} % correct", "strong", asked)
    points = 100 * statement.interval.estimate
    bounds = statement.interval.bounds(".1%")
    certainty = bounds and f"95 % interval {bounds}"
    style = style_of(statement)
    if not statement.is_conclusion:
        about = "; ".join(filter(None, [certainty, statement.why]))
        return Line(f"{statement.words}: {points:+.1f} points", style, about)
    words = "more accurate" if statement.relation == "above" else "less accurate"
    return Line(f"{words} by {abs(points):.1f} points", style, certainty or "")


def _doubts(row: EvalRow) -> list[str]:
    """Sentences that weaken the result over all seeds; [] if there are none."""
    doubts = []
    if row.status != "ok":
        doubts.append(
            f"{row.status}: the figures cover {counted(row.num_prompts or 0, 'question')} only."
        )
    different = row.num_different_prompts
    if row.num_prompts is not None and different not in (None, row.num_prompts):
        numbers = f"{row.num_prompts:,} questions, {different:,} different"
        meaning = "a greedy answer to a repeated question counts once"
        if row.temperature:
            meaning = "every answer counts, and the interval is for these questions only"
        doubts.append(f"{numbers}: {meaning}.")
    if lossy := lossy_warning(row):
        doubts.append(lossy)
    if _differs_beyond_ties(row):
        doubts.append(_identity(row))
    return doubts


def _next_steps(rows: Sequence[EvalRow], statement: Statement) -> list[NextStep]:
    """The step after a run: if accuracy differs, `recovery`, which tests the texts; otherwise about as many
    questions as exclude a difference of the margin, or all that there are, but at least twice as many as were asked.
    [] if there are no more questions, if that would be too many, or if the arms were not compared.

    For example, with 200 questions per seed the interval is -4 to +6 points, and the margin is 5 points. Half of the
    interval is as wide as one margin, so three times as many questions are suggested: `num_prompts=600`.
    """
    row = rows_over_all_seeds(rows)[-1]
    if row.difference is None or row.status != "ok":
        return []
    if statement.is_conclusion:
        recovery = typed_again("", command="recovery", leaving_out=_OWN_SETTINGS)
        return [lossless_again(row) or NextStep("is it lossless?", command=recovery)]
    # A damaged file may hold any text.
    operands = re.fullmatch(r"(\d{1,10})-(\d{1,10})", row.operands or "")
    width = row.difference.high - row.difference.low
    if operands is None or not 0 <= width <= 2:
        return []
    low, high = map(int, operands.groups())
    num_possible = (high - low + 1) ** 2
    # Half of the interval's width in margins. The width shrinks with the root of the number of questions.
    margins = width / 2 / (row.margin or MARGIN)
    growth = max(_LEAST_GROWTH, _SUGGESTED_GROWTH * margins**2)
    # For each seed, because the rows of single seeds come first. The number that is suggested is for each seed, too.
    num_asked = rows[0].num_prompts or 0
    num_needed = num_asked * growth
    # Greedy answers to the same question count once, so no seed should ask a question twice.
    changes = "replacement=false " if row.replacement and not row.temperature else ""
    if changes or not row.replacement:
        # Without replacement, more questions than these would only repeat some.
        num_needed = min(num_needed, num_possible)
    if not num_asked < num_needed <= MOST_QUESTIONS:
        return []
    return [NextStep("more questions", f"{changes}num_prompts={math.ceil(num_needed)}")]


def accuracy_table(runs: Sequence[Named[EvalRow]], statements: Sequence[Statement]) -> Table:
    """A table with rows for each arm: for a single run one row per seed and one over all seeds; for several runs only
    the row over all seeds.

    Args:
        statements: the statement about the difference in each run.
    """
    # Only rows over all seeds have a statement. The difference in a single seed is a figure without a conclusion. A
    # statement belongs to the very row that is its subject; rows of two runs may be equal.
    said = {id(item.subject): item for item in statements if item.interval.is_known}
    lines = []
    for named in runs:
        rows = rows_over_all_seeds(named.run.rows)
        # Of a run with one seed, whose rows have two values of `seed` (the seed, and `all`), only the rows for `all`
        # are shown, because the others are equal. Of several runs, only the rows for `all` are shown, too.
        if len(runs) == 1 and len({row.seed for row in named.run.rows}) != 2:
            rows = named.run.rows
        lines += [named._replace(row=row) for row in rows]
    columns = (
        Column("pair", text=True, of="name.cell", varies=True, once=True),
        Column("K", of=lambda named: k_in_words(named.row), optional=True),
        Column("arm", text=True, of=arm_name).at("row"),
        Column("seed", of="row.seed", varies=True),
        Column("asked", of="row.num_prompts"),
        Column("correct %\n± Wald", of=_with_margin),
        Column("Wilson\n95 %", of=_wilson).at("row"),
        # Empty if all answers contained a number.
        Column("parsed", of="num_parsed", optional=True).at(
            lambda line: None if line.row.num_parsed == line.row.num_prompts else line.row
        ),
        Column(
            "difference",
            _difference,
            lambda line: said.get(id(line.row), line.row.difference),
            optional=True,
            reference=0,
        ),
        Column("McNemar p", "{:.2g}".format, "row.mcnemar_p_value", optional=True),
        Column("ms per\nanswer", number(), "row.ms_per_answer"),
        Column("accepted", share, "row.acceptance_rate"),
        Column("pub-\nlished %", _percent, "row.published_accuracy", optional=True),
    )
    seeds = {line.row.seed for line in lines}
    is_published = any(line.row.published_accuracy is not None for line in lines)
    return Table.of(
        "accuracy",
        "Accuracy",
        lines,
        columns,
        strong=lambda line: len(seeds) > 1 and line.row.seed == "all",
        faint=lambda line: line.row.status != "ok",
        about="Difference: speculative minus regular, percentage points. Wald's ±, which published tables print, is too"
        " narrow over few questions; on average Wilson's interval is not.",
        notes=(MULTIPLICATION_NOTE,) if is_published else (),
    )


def _percent(rate: float) -> str:
    """`42.5` for 0.425."""
    return f"{100 * rate:.1f}"


def _with_margin(line: Named) -> str | None:
    """`42.5 ± 3.1`, in percent."""
    rate = line.row.accuracy
    high = line.row.wald_high
    if rate is None or high is None:
        return None
    return f"{_percent(rate)} ± {_percent(high - rate)}"


def _wilson(row: EvalRow) -> str | None:
    """`39.4 to 45.7`, in percent; None if unknown."""
    if row.wilson_low is None or row.wilson_high is None:
        return None
    return f"{_percent(row.wilson_low)} to {_percent(row.wilson_high)}"


def _difference(found: Statement | Interval) -> str:
    """The difference in percentage points and, in a second line, its bounds if it has any: `+1.2`, `-0.8 to 3.1`."""
    difference = found.interval if isinstance(found, Statement) else found
    lines = [f"{100 * difference.estimate:+.1f}", difference.bounds(".1%")]
    return "\n".join(filter(None, lines))


def _notes(merged: Sequence[EvalRow]) -> Iterator[str]:
    """Yield notes about equal answers (unless a doubt mentions them) and about answers of earlier runs.

    Args:
        merged: the row of each arm over all seeds.
    """
    row = merged[-1]
    if row.identical_prompts is not None and not _differs_beyond_ties(row):
        yield _identity(row)
    num_resumed = sum(row.num_resumed or 0 for row in merged)
    if num_resumed:
        answers = f"{num_resumed} of {sum(row.num_prompts or 0 for row in merged)} answers"
        earlier = "with their times, are from earlier runs of this command"
        yield f"{answers}, {earlier}; resume=false measures again."


def _identity(row: EvalRow) -> str:
    """A sentence that says how many greedy answers are the same in both arms, and how many should be."""
    identical = (
        f"{row.identical_prompts} of {row.num_prompts} greedy answers are the same in both arms"
    )
    if row.lossy:
        return f"{identical}."
    return f"{identical}: in float32 all should be, in other formats ties may break differently."


def _differs_beyond_ties(row: EvalRow) -> bool:
    """Whether greedy answers differ although rounding explains no difference."""
    is_exact = row.dtype == "float32" and row.quantization == "none" and not row.lossy
    return is_exact and row.identical_prompts not in (None, row.num_prompts)
