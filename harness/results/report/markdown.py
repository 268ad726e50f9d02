"""The report as Markdown that GitHub shows as it is meant."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from harness.results.report.tables import Table

if TYPE_CHECKING:
    from harness.results.report.report import Report

# An underscore within a word is none of emphasis, and names are full of them.
_SPECIAL = re.compile(r"([\\`*\[\]<>|~$#&]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9]))")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


def markdown(report: Report) -> str:
    """The whole report, without its plots."""
    parts = ["# Speculative decoding: what was measured", "\n".join(f"- {escape(one)}" for one in report.headlines)]
    parts += [_table(table) for table in report.tables]
    if report.notes:
        parts.append("## Notes\n\n" + "\n".join(f"- {escape(note)}" for note in report.notes))
    parts.append("The plots are in `report.html`.")
    return "\n\n".join(parts) + "\n"


def escape(text: str) -> str:
    """Text that Markdown must not interpret; line ends become `<br>`."""
    escaped = _SPECIAL.sub(r"\\\1", _CONTROL.sub(" ", text.replace("\r\n", "\n").replace("\r", "\n")))
    return escaped.replace("\n", "<br>")


def _table(table: Table) -> str:
    rules = ["---" if number < table.num_texts else "---:" for number in range(len(table.columns))]
    lines = [[escape(heading.replace("\n", " ")) for heading in table.columns], rules]
    for row in table.rows:
        cells = [escape(cell) for cell in row.cells]
        if row.strong:
            cells = [f"**{cell}**" if cell and number >= table.num_texts else cell for number, cell in enumerate(cells)]
        lines.append(cells)
    text = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    if table.in_full and table.key in ("all_published", "files"):
        text = f"<details><summary>{table.title}</summary>\n\n{text}\n\n</details>"
    else:
        text = f"## {table.title}\n\n" + (f"{escape(table.about)}\n\n" if table.about else "") + text
    return text + "".join(f"\n\n{escape(note)}" for note in table.notes)
