"""The report as one HTML page that needs nothing else: no script, no font, no picture from anywhere."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from harness.results.report.tables import Table

if TYPE_CHECKING:
    from harness.results.report.report import Report

_STYLE = Path(__file__).with_name("report.css")
_TITLE = "Speculative decoding: what was measured"

# Under which table each plot stands, and what it shows.
_PLOTS = {
    "speedup": ("pairs", "Speed-up of each pair at its best K", "Total regular over total speculative time on the same"
                " prompts; bars are 95&nbsp;% paired bootstrap intervals over prompts."),
    "times": ("pairs", "Milliseconds a token", "What the reader of one text waits, the prompt's own pass included."),
    "positions": ("reasons", "Acceptance by position", "Of the draft tokens that verification looked at."),
    "num_draft_tokens": ("reasons", "Speed-up against K", "Predicted: (1 − α^(K+1)) / ((1 − α)(K·c + v)), with"
                         " acceptance α, draft step c and verification v as measured."),
    "accuracy": ("accuracy", "Accuracy of both arms", "Right answers to the same questions."),
}  # fmt: skip
# Folded away: for looking things up.
_FOLDED = ("arms", "all_published", "files")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


def html_page(report: Report, plots: Mapping[str, Sequence[str]]) -> str:
    """The page.

    Args:
        plots: name -> SVGs; those that are missing leave no gap.
    """
    sections = [_section(table, plots) for table in report.tables]
    headlines = "\n".join(f"<li>{_text(sentence)}</li>" for sentence in report.headlines)
    notes = "".join(f"<p class=note>{_text(note)}</p>\n" for note in report.notes)
    return f"""\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{_TITLE}</title>
<style>
{_STYLE.read_text(encoding="utf-8")}</style>
</head>
<body>
<main>
<h1>{_TITLE}</h1>
<ul class="headlines">
{headlines}
</ul>
{"".join(sections)}
<footer>
{notes}<p>Made by <code>python -m harness report</code>. Every figure stands in the CSV files named above.</p>
</footer>
</main>
</body>
</html>
"""


def _section(table: Table, plots: Mapping[str, Sequence[str]]) -> str:
    about = f"<p class=about>{_text(table.about)}</p>\n" if table.about else ""
    notes = "".join(f"<p class=note>{_text(note)}</p>\n" for note in table.notes)
    body = about + _figures(table.key, plots) + _table(table) + notes
    if table.key in _FOLDED:
        return f"<details><summary>{_text(table.title)}</summary>\n{body}</details>\n"
    return f"<section id={table.key}>\n<h2>{_text(table.title)}</h2>\n{body}</section>\n"


def _figures(key: str, plots: Mapping[str, Sequence[str]]) -> str:
    figures = []
    for name, (place, title, about) in _PLOTS.items():
        if place != key or name not in plots:
            continue
        caption = f"<figcaption id=caption-{name}><b>{title}</b>{about}</figcaption>"
        many = len(plots[name]) > 1
        svgs = "\n".join(plots[name])
        drawn = f"<div class=plots>\n{svgs}</div>" if many else svgs
        figures.append(f"<figure{' class=many' if many else ''}>{caption}\n{drawn}</figure>\n")
    return f"<div class=plots>\n{''.join(figures)}</div>\n" if figures else ""


def _table(table: Table) -> str:
    kinds = [' class="text"' if number < table.num_texts else "" for number in range(len(table.columns))]
    heading = "".join(
        f"<th scope=col{kind}>{_text(name)}</th>" for kind, name in zip(kinds, table.headings, strict=True)
    )
    rows = []
    for place, row in enumerate(table.rows):
        style = ' class="strong"' if row.strong else ' class="faint"' if row.faint else ""
        cells = [f"<td{kind}>{_cell(cell)}</td>" for kind, cell in zip(kinds, row.cells, strict=True)]
        if row.cells[0]:
            cells[0] = cells[0].replace("<td", f"<td rowspan={_height(table, place)}", 1)
        elif place:
            del cells[0]
        rows.append(f"<tr{style}>{''.join(cells)}</tr>\n")
    return (
        f'<div class="wide {table.key}" tabindex=0>\n<table>\n<thead><tr>{heading}</tr></thead>\n'
        f"<tbody>\n{''.join(rows)}</tbody>\n</table>\n</div>\n"
    )


def _height(table: Table, place: int) -> int:
    """Rows that the first cell of this one is for."""
    following = (number for number, row in enumerate(table.rows) if number > place and row.cells[0])
    return next(following, len(table.rows)) - place


def _cell(text: str) -> str:
    first, *details = text.split("\n")
    return _text(first) + "".join(f"<small>{_text(detail)}</small>" for detail in details)


def _text(text: str) -> str:
    return escape(_CONTROL.sub(" ", text))
