"""The page of a command without tables: a table of its figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.reporting.page import Page, title_of_many
from harness.reporting.table import Column, Table
from harness.results.schema import RunRow


def figures_page(command: str, rows: Sequence[RunRow]) -> Page | None:
    """A page with one line per row that has figures, and a column for each of them; None where nothing was measured."""
    rows = [row for row in rows if row.has_figures]
    if not rows:
        return None
    columns = [
        Column("model", text=True, of="model"),
        Column("draft", text=True, of="draft", optional=True),
    ]
    for name, column in rows[0].columns().items():
        if column.kind == "figure":
            heading = name.replace("_", " ")
            columns.append(Column(heading, _in_short, column.of, text=column.type is str))
    table = Table.of(command, f"Figures of {command}", rows, columns)
    return Page(title_of_many(rows), tables=[table])


def _in_short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
