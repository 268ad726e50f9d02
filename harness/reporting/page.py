"""A page about runs (one run, the runs of a sweep, or those of a report), as one value for every medium.

On a terminal, only about a dozen lines of a page are shown. The whole page is in `summary.txt`, which `details=true`
prints, and in a report's files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from harness.config.acceptance_rules import changed_lenience
from harness.config.amounts import counted
from harness.config.settings import DecodingSettings
from harness.reporting.table import Column, Document, Line, Table
from harness.reporting.words import (
    called,
    common_settings,
    device_of,
    lossy_rule,
    pair_name,
    typed_again,
)
from harness.results.judging.statement import Statement
from harness.results.row import ColumnDescription
from harness.results.runs import Run
from harness.results.schema import RunRow
from harness.results.statistics.interval import DASH, Interval

# The most next steps that are shown; if the page has a doubt, `in_short` shows one fewer.
_MOST_STEPS = 2
# The most findings below the first one.
_MOST_FINDINGS = 12
# The most rows of the short table.
_MOST_ROWS = 20
# The most parts (pages about single series) that are shown.
_MOST_PARTS = 5
# Characters of an 80-character line that remain for a name and its text, without the indents.
_WIDTH = 76


@dataclass(frozen=True)
class NextStep:
    """A next step that is suggested to the user.

    Attributes:
        text: the reason for the step.
        changes: settings that are added to the command that was typed, such as `K=8`.
        command: another command in full, which replaces the command that was typed; empty for `changes`.
    """

    text: str
    changes: str = ""
    command: str = ""

    @property
    def typed(self) -> str:
        """The whole command that the user should type."""
        return self.command or typed_again(self.changes)


@dataclass(frozen=True)
class Page:
    """A page about runs.

    Attributes:
        title: made by `heading` or `title_of_many`.
        finding: the most important result, then further results; empty if there are only figures.
        doubts: sentences that weaken the finding, the most serious first.
        tables: the first table is the short one. A table with the look `bare` is shown only on a terminal.
        why: reasons, as pairs of a name and a sentence, such as `("Why", "83 % accepted")`.
        next: next steps, the most useful first.
        statements: the statements about runs, as values; the findings are sentences made from these.
        plots: makes matplotlib figures with titles, by the kind of plot; it is called only for a report's files. `dict`
            makes none.
        parts: pages about one series of runs each, which are shown below each other under their titles.
        without_verdict: runs about which the page concludes nothing.
    """

    title: str
    finding: Sequence[Line] = ()
    doubts: Sequence[str] = ()
    tables: Sequence[Table] = ()
    why: Sequence[tuple[str, str]] = ()
    next: Sequence[NextStep] = ()
    statements: Sequence[Statement] = ()
    plots: Callable[[], Mapping[str, Sequence[Any]]] = dict
    parts: Sequence[Page] = ()
    without_verdict: Sequence[Run] = ()

    @property
    def full_tables(self) -> list[Table]:
        """The tables that files show: all except empty tables and tables for a terminal."""
        return [table for table in self.tables if table.rows and table.look != "bare"]


def without(title: str, shared: str) -> str:
    """Return the parts of a title that the title of a larger group of runs does not contain: `K=4` for the titles
    `13B + 7B · K=4` and `13B + 7B · greedy`.
    """
    return " · ".join(words for words in title.split(" · ") if words not in shared.split(" · "))


def heading(row: RunRow, settings: str) -> str:
    """The title of one run: `13B + 7B · NVIDIA A100 · 15 prompts (english) · K=4`."""
    return " · ".join(filter(None, [pair_name(row, " + "), device_of(row), settings]))


def num_runs(rows: Sequence[RunRow]) -> int:
    """The number of runs that these rows are from, one row of each. A pooled row is from several runs."""
    return sum(len(getattr(row, "pooled_runs", None) or [row]) for row in rows)


def title_of_many(rows: Sequence[RunRow], noun: str = "run") -> str:
    """The title of several runs: their common pair or, if they have several pairs, their number and common target; then
    their common settings.

    Args:
        rows: one row of each run, at least one.
        noun: the word for a run, if the runs have several pairs.
    """
    pairs = {pair_name(row) for row in rows}
    targets = {called(row.model or "") for row in rows}
    what = counted(num_runs(rows), noun)
    if len(pairs) == 1:
        what = pairs.pop()
    elif len(targets) == 1:
        what += f" of {targets.pop()}"
    # The title names a device only if all runs are simulated, to say that the costs are made up.
    simulated = device_of(rows[0]) if all(row.is_simulated for row in rows) else None
    return " · ".join(filter(None, [what, simulated, common_settings(rows)]))


def lossless_again(row: Any) -> NextStep | None:
    """The next step to measure again with a lossless rule; None if the rule is lossless already, or if the rule is set
    on a server.

    Args:
        row: a row of any kind with the columns `rule` and `lenience`.
    """
    if lossy_rule(row) is None or row.is_elsewhere:
        return None
    plain = DecodingSettings()
    changes = [f"rule={plain.rule}"] if row.rule not in (None, plain.rule) else []
    if changed_lenience(row) is not None:
        changes.append("lenience=1")
    return NextStep("lossless", " ".join(changes))


def figures_table(
    rows: Sequence[RunRow], name_of: Callable[[Any], str], notes: Sequence[str] = ()
) -> Table:
    """A table with one line per known figure of a run: the figure's name, its value in each row, and its meaning.

    Args:
        name_of: returns the heading of a row's column.
    """
    columns = [
        Column("figure", text=True, of="field"),
        *(Column(name_of(row), _in_digits, partial(_value, row), text=True) for row in rows),
        Column(
            "meaning",
            text=True,
            of=lambda figure: f"{figure.text} {figure.unit and f'({figure.unit})'}",
        ),
    ]
    known = [
        column
        for column in rows[0].columns().values()
        # An interval is a single figure, which is shown with its bounds.
        if column.kind == "figure" and column.part in ("", "estimate")
        if any(_value(row, column) is not None for row in rows)
    ]
    return Table.of("figures", "Every figure", known, columns, notes=tuple(notes), look="plain")


def _value(row: RunRow, figure: ColumnDescription) -> Any:
    return getattr(row, figure.field)


def _in_digits(value: Any) -> str:
    """A value as text: `12.346`, `2.31 (2.18 to 2.42)`; for a list, `0.92 0.87 –`."""
    if isinstance(value, list):
        return " ".join(DASH if entry is None else _in_digits(entry) for entry in value)
    return f"{value:.5g}" if isinstance(value, float | Interval) else str(value)


def in_short(page: Page, *, rest: str = "details=true") -> Document:
    """Shorten a page for a terminal: to about a dozen lines of 80 characters, if its first table has at most four rows.

    All doubts come first. Two next steps are shown, or one if there is a doubt.

    Args:
        rest: the place where a reader finds what was left out, for the line that says so.
    """
    shown = replace(
        page, finding=page.finding[: _MOST_FINDINGS + 1], parts=page.parts[:_MOST_PARTS]
    )
    num_more = len(page.finding) + len(page.parts) - len(shown.finding) - len(shown.parts)
    lines = _top(shown, partial(in_short, rest=rest))
    if num_more:
        what = " (other series, single runs)" if page.parts else ""
        lines.append(Line(f"    {num_more} more{what}: {rest}", "dim"))
    if page.finding or (page.doubts and not page.parts):
        lines.append(Line(""))
    if not page.parts:
        lines += [_short_table(table, rest) for table in page.tables[:1]]
    return [*lines, *_named(page.why, page.next[: _MOST_STEPS - bool(page.doubts)])]


def in_full(page: Page) -> Document:
    """The whole page: every doubt and finding, all tables that files show, and at most two next steps."""
    # A page that only has tables for a terminal shows these.
    tables = page.full_tables or page.tables
    lines = _top(page, in_full)
    # Above the title of a table an empty line is printed anyway.
    if page.finding and not (tables and tables[0].title):
        lines.append(Line(""))
    lines += tables[:1]
    lines += _named(page.why, page.next[:_MOST_STEPS])
    return [*lines, Line(""), *tables[1:]] if tables[1:] else lines


def below_each_other(pages: Mapping[str, Page], show: Callable[[Page], Document]) -> Document:
    """Show pages below each other, each under the question that it answers, and followed by an empty line."""
    lines: list[Table | Line] = []
    for question, page in pages.items():
        lines += [Line(question, "strong"), *show(page), Line("")]
    return lines


def _top(page: Page, show: Callable[[Page], Document]) -> list[Table | Line]:
    """The title, doubts, findings and parts of a page. The title of a part does not repeat the page's title."""
    lines: list[Table | Line] = [Line(page.title, "dim"), Line("")] if page.title else []
    lines += [Line(f"  {doubt}", "warning") for doubt in page.doubts]
    lines += [replace(line, text=f"  {line.text}") for line in page.finding]
    for number, part in enumerate(page.parts):
        if number or page.doubts:
            lines.append(Line(""))
        # If the page's title says all that the part's title says, the part keeps its title. For example, prompts are
        # answered one by one in a part, and in batches in another.
        title = without(part.title, page.title) or part.title
        lines += show(replace(part, title=title, next=()))
    return lines


def _named(why: Sequence[tuple[str, str]], steps: Sequence[NextStep]) -> list[Table | Line]:
    """The reasons and next steps as lines, in which each name occurs only once."""
    typed = [(step.text, step.typed) for step in steps]
    named = [(f"{name:4}", text) for name, text in [*why, *_steps_in_lines(typed, why)]]
    return [Line(""), Table.from_lines("next", named)] if named else []


def _short_table(table: Table, rest: str) -> Table:
    """The table for a terminal, with at most `_MOST_ROWS` rows. A table in a box loses the box, its title and notes."""
    if table.look == "box":
        table = replace(table, title="", about="", notes=(), look="bare")
    num_more = len(table.rows) - _MOST_ROWS
    if num_more <= 0:
        return table
    return replace(table, rows=table.rows[:_MOST_ROWS], notes=(f"    {num_more} more: {rest}",))


def _steps_in_lines(
    steps: Sequence[tuple[str, str]], why: Sequence[tuple[str, str]]
) -> list[tuple[str, str]]:
    """The next steps as lines with the name `Next`: `try more draft tokens   harness latency draft=tiny K=8`.

    Args:
        steps: the text and the command of each step.
        why: the reasons, with which the steps share a column of names.
    """
    width = max((len(text) for text, _ in steps), default=0)
    texts = [f"{text:{width}}   {command}" for text, command in steps]
    room = _WIDTH - max(len(name) for name, _ in [*why, ("Next", "")])
    if any(len(text) > room for text in texts):
        # A wrapped command could not be copied. So the command gets a line of its own, and only one step is shown.
        texts = ["\n".join(steps[0])]
    return [("Next", text) for text in texts]
