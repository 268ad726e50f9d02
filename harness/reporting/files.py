"""Shows a report as one HTML page that needs no other file, as Markdown for GitHub, or on a terminal."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jinja2

from harness.reporting.page import Page, below_each_other, in_short, without
from harness.reporting.table import (
    Document,
    Line,
    Table,
    legend,
    sentences,
    visible,
)
from harness.results.judging.statement import Statement
from harness.results.statistics.interval import Interval

# Characters that Markdown interprets: `*`, `[`, `](` and so on, and an underscore at the beginning or end of a word.
# Markdown does not interpret an underscore within a word, as in `tiny_draft`.
_SPECIAL = re.compile(r"([\\`*\[\]|~$#]|(?<=\])\(|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9]))")
# The width in pixels of the area in which an interval is drawn (`page.html.j2` contains the same number), and the
# margin for a mark at either end.
_WIDTH = 100
_EDGE = 4
# A table shows at most this many rows, because a longer page takes minutes to make and to open. The CSV files contain
# all rows.
_MOST_ROWS = 1_000
# The most findings about a question in the box at the top of a report.
_MOST_ANSWERS = 3


@dataclass(frozen=True)
class ReportContents:
    """The contents of a report, for every medium.

    Attributes:
        about: the number of measurements, the days on which they ran, and the settings that all runs share.
        pages: the pages, by the question that each answers.
        sources: tables of the machines of the runs, and of the files that were read.
        notes: lines about files or rows that could not be read, or were left out.
        is_single: whether the report is about a single run.
    """

    title: str
    about: Sequence[str]
    pages: Mapping[str, Page]
    sources: Sequence[Table]
    notes: Sequence[str]
    is_single: bool = False

    @property
    def answers(self) -> dict[str, list[Line]]:
        """For each question, the lines in the box at the top, in this order: doubts; findings, each after the title of
        its part; the title of a page without parts, with the words left out that `about` contains; and reasons.
        """
        answers = {}
        for question, page in self.pages.items():
            said = [(page, line) for line in page.finding]
            # Of parts, only the lines with `more` are shown. These are about best runs, and `more` is their interval.
            # Lines that compare other runs of a series with its best run have none.
            said += [(part, line) for part in page.parts for line in part.finding if line.more]
            findings: list[Line] = []
            for part, line in said[:_MOST_ANSWERS]:
                title = "" if part is page else without(part.title, page.title)
                findings += [*sentences("plain", title), line]
            if len(said) > _MOST_ANSWERS:
                findings.append(Line(f"and {len(said) - _MOST_ANSWERS} more"))
            if not page.parts:
                findings += sentences("plain", without(page.title, " · ".join(self.about)))
            doubts = dict.fromkeys(doubt for each in (page, *page.parts) for doubt in each.doubts)
            answers[question] = said_by(replace(page, finding=findings, doubts=[*doubts]))
        return answers


def said_by(page: Page) -> list[Line]:
    """Return the doubts, findings and reasons of a page, in this order."""
    reasons = [f"{name}: {text}" for name, text in page.why]
    return [*sentences("warning", *page.doubts), *page.finding, *sentences("plain", *reasons)]


def on_terminal(report: ReportContents) -> Document:
    """Return each page in its short form, without next steps, because they extend the command that measured. Notes
    follow.

    The page about a single run is otherwise as the run printed it; it has no heading with the question.
    """

    def short(page: Page) -> Document:
        return in_short(replace(page, next=()), rest="report.md")

    pages = report.pages
    shown = short(*pages.values()) if report.is_single else below_each_other(pages, short)
    return [*shown, *sentences("warning", *report.notes)]


def html_page(
    report: ReportContents, plots: Mapping[str, Mapping[str, Sequence[tuple[str, str]]]]
) -> str:
    """Return an HTML page that loads no font, picture or script from other files or addresses. Tables of parts and
    tables to look up figures in open on a click.

    Args:
        plots: for each question, the titles and SVGs of each kind of plot.
    """
    css, script = (
        Path(__file__).with_name(name).read_text(encoding="utf-8")
        for name in ("report.css", "report.js")
    )
    return _render("page.html.j2", report=report, plots=plots, css=css, script=script)


def markdown(report: ReportContents, note: str) -> str:
    """Return a Markdown page without plots: the answers as a list, then tables and sentences.

    Args:
        note: the last line, which says where the plots are.
    """
    text = _render("page.md.j2", report=report, note=note)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def escape(text: str) -> str:
    """Escape text so that Markdown shows it unchanged; line ends become `<br>`."""
    lines = visible(text.replace("\r\n", "\n").replace("\r", "\n"))
    escaped = _SPECIAL.sub(r"\\\1", lines)
    # HTML characters become entities, because not every renderer understands a backslash before them.
    return html.escape(escaped, quote=False).replace("\n", "<br>")


def _render(template: str, **content: Any) -> str:
    """The text that a template of this folder makes from `content`, with the functions below as its filters."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=template.startswith("page.html"),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        extensions=["jinja2.ext.do"],
    )
    environment.filters |= {
        "escaped": escape,
        "number": _number,
        "scale": _scale,
        "side": _side,
        "legend": legend,
        "said_by": said_by,
        "without": without,
        "first": lambda table: table.first(_MOST_ROWS),
    }
    return visible(environment.get_template(template).render(content, zip=zip))


def _side(statement: object) -> str:
    """Return the position of a statement's interval: `above` or `below` its reference, `over` if nothing is concluded,
    or `unknown` without bounds; empty for a value that is not a statement.
    """
    if not isinstance(statement, Statement):
        return ""
    if not statement.interval.has_bounds:
        return "unknown"
    return "over" if statement.relation == "open" else statement.relation


def _number(value: object) -> float | None:
    """Return the number by which a cell is sorted; None for text."""
    if isinstance(value, Statement):
        value = value.interval
    if isinstance(value, Interval):
        value = value.estimate
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _scale(values: Sequence[object], reference: float) -> Callable[[float], float]:
    """Return the scale of a column's statements, as a function from a value to pixels from the left. Values beyond the
    scale are placed at its ends.

    Args:
        reference: the value at which a line is drawn, such as 1 for speed-ups.
    """
    shown = [value.interval for value in values if isinstance(value, Statement)]
    ends = [end for figure in shown for end in (figure.estimate, figure.low, figure.high)]
    known_ends = [reference, *(end for end in ends if not math.isnan(end))]
    # The scale extends beyond the estimates by at most their range, so that one wide interval does not squeeze all
    # others.
    estimates = [reference, *(figure.estimate for figure in shown)]
    margin = max(estimates) - min(estimates) or 0.5
    low = max(min(estimates) - margin, min(known_ends))
    high = min(max(estimates) + margin, max(known_ends))

    def place(value: float) -> float:
        share = (value - low) / ((high - low) or 1.0)
        return round(_EDGE + (_WIDTH - 2 * _EDGE) * min(1.0, max(0.0, share)), 1)

    return place
