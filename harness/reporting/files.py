"""The report as files: one HTML page that needs nothing else, and Markdown that GitHub shows as it is meant."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jinja2

from harness.reporting.page import Page, in_short
from harness.reporting.table import (
    Column,
    Document,
    Line,
    Table,
    legend,
    naming,
    sentences,
)
from harness.results.runs import Run
from harness.results.statistics.interval import Interval

# Control characters but for tab and line feed.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
# Characters that Markdown interprets: `*`, `[`, `](`, and an underscore that begins or ends a word. Names are
# full of those within a word, `tiny_draft`, which are no emphasis.
_SPECIAL = re.compile(r"([\\`*\[\]|~$#]|(?<=\])\(|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9]))")
# The width of a drawn interval, in pixels.
_WIDTH = 100


# Further rows are left to the CSV files: a longer page takes minutes to make and to open.
_MOST_ROWS = 1_000


@dataclass(frozen=True)
class Report:
    """The contents of a report, for every medium.

    Attributes:
        about: the number of measurements, days, and the settings that all share.
        pages: by the question that each answers.
        sources: tables about where the runs ran, and the files that were read.
        notes: what could not be read, or was left out.
        runs: those that it is about.
    """

    title: str
    about: Sequence[str]
    pages: Mapping[str, Page]
    sources: Sequence[Table]
    notes: Sequence[str]
    runs: Sequence[Run]

    @property
    def answers(self) -> dict[str, list[Line]]:
        """For each question: doubts, findings, subject and reasons."""
        answers = {}
        for question, page in self.pages.items():
            about = [page.title, *(f"{name}: {text}" for name, text in page.why)]
            answers[question] = [
                *sentences("warning", *page.doubts),
                *page.finding,
                *sentences("plain", *about),
            ]
        return answers

    @property
    def tables(self) -> dict[str, list[Table]]:
        """For each question the tables of its page."""
        return {
            question: [table.first(_MOST_ROWS) for table in page.full_tables]
            for question, page in self.pages.items()
        }

    @property
    def all_tables(self) -> list[Table]:
        return [table for tables in self.tables.values() for table in tables] + [*self.sources]


def on_terminal(report: Report) -> Document:
    """Each page in short, without next steps: the command that was typed is `report`."""
    lines: list[Table | Line] = []
    for question, page in report.pages.items():
        short = in_short(replace(page, next=()), rest="report.md")
        lines += [Line(question, "strong"), *short, Line("")]
    return [*lines, *sentences("warning", *report.notes)]


def html_page(report: Report, plots: Mapping[str, Mapping[str, Sequence[tuple[str, str]]]]) -> str:
    """The page: no font, no picture, no script from anywhere. Tables in full open on a click.

    Args:
        plots: titles and SVGs by the question of their page, and by the name of their plot.
    """
    css, script = (
        Path(__file__).with_name(name).read_text(encoding="utf-8")
        for name in ("report.css", "report.js")
    )
    return _render("page.html.j2", report=report, plots=plots, css=css, script=script)


def markdown(report: Report, note: str) -> str:
    """A page without plots: answers as a list, then tables and sentences.

    Args:
        note: the last line, which says where the plots are.
    """
    text = _render("page.md.j2", report=report, note=note)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def escape(text: str) -> str:
    """Text that Markdown must not interpret, neither as HTML nor as a link; line ends become `<br>`."""
    lines = _CONTROL.sub(" ", text.replace("\r\n", "\n").replace("\r", "\n"))
    escaped = _SPECIAL.sub(r"\\\1", lines)
    # Entities, because not every renderer takes a backslash before HTML.
    return html.escape(escaped, quote=False).replace("\n", "<br>")


def _render(template: str, **content: Any) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=template.startswith("page.html"),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        extensions=["jinja2.ext.do"],
    )
    environment.filters |= {
        "plain": lambda text: _CONTROL.sub(" ", text),
        "escaped": escape,
        "number": _number,
        "scale": _scale,
        "side": _side,
        "leading": _leading,
        "legend": legend,
    }
    return environment.get_template(template).render(content, zip=zip)


def _side(figure: Interval, reference: float) -> str:
    """Where an interval is: `above` the reference, `below` it, `over` it, or `unknown`."""
    if not figure.has_bounds:
        return "unknown"
    if not figure.excludes(reference):
        return "over"
    return "above" if figure.low > reference else "below"


def _leading(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> list[str]:
    """The role of each column on a telephone, where a row is a card: its `name`, further words of it (`about`), its
    `figure`, or one of the `rest`, which opens on a tap.
    """
    names = naming(columns)
    num_names = len(names)
    # Words say more than the number of a seed.
    name = next((index for index, column in enumerate(names) if column.text), 0)
    figures = {index for index, column in enumerate(columns) if column.reference is not None}
    if not figures or any(not row[index] for row in rows for index in figures):
        # A regular arm has no speed-up.
        figures.add(num_names)
    parts = ["name" if index == name else "about" for index in range(num_names)]
    further = range(num_names, len(columns))
    return [*parts, *("figure" if index in figures else "rest" for index in further)]


def _number(value: object) -> float | None:
    """The number that a cell is sorted by; None for text."""
    if isinstance(value, Interval):
        value = value.estimate
    is_number = isinstance(value, int | float) and math.isfinite(value)
    return float(value) if is_number else None  # type: ignore[arg-type]


def _scale(figures: Sequence[Interval | None], reference: float) -> Callable[[float], float]:
    """The function that places the figures of a column: a value -> pixels from the left.

    Args:
        reference: the value at which a line is drawn, 1 for speed-ups.
    """
    shown = [figure for figure in figures if figure is not None]
    ends = [end for figure in shown for end in (figure.estimate, figure.low, figure.high)]
    known_ends = [reference, *(end for end in ends if not math.isnan(end))]
    # One wide interval must not squeeze all others.
    estimates = [reference, *(figure.estimate for figure in shown)]
    room = 2 * (max(estimates) - min(estimates)) or 1.0
    low = max(min(estimates) - room / 2, min(known_ends))
    high = min(max(estimates) + room / 2, max(known_ends))

    def place(value: float) -> float:
        share = (value - low) / ((high - low) or 1.0)
        return round(4 + (_WIDTH - 8) * min(1.0, max(0.0, share)), 1)

    return place
