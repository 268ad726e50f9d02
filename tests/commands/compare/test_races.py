"""Sentences about races: the verdict on one, its rejections, and the table over many."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from harness.commands.compare.rows import CompareRow
from harness.commands.compare.tables import races_page, rejections
from harness.reporting.table import Line
from harness.reporting.terminal import print_document
from harness.results.acceptance import Rejection
from harness.results.runs import Run

ROW: dict[str, Any] = {
    "model": "13B", "draft": "7B", "num_draft_tokens": 4, "speedup": 2.0, "acceptance_rate": 0.75, "lossy": False,
    "mean_acceptance_length": 4.0, "lenience": 1.0, "identical": True, "temperature": 0.0, "regular_ms_per_token": 3.0,
}  # fmt: skip


def test_rejections_show_spaces_and_cannot_steer_the_terminal() -> None:
    console = Console(file=io.StringIO(), width=80)
    print_document(rejections([Rejection(7, " won\x1b[2J", 0.25, None, "\n")]), console)
    assert isinstance(console.file, io.StringIO)
    printed = console.file.getvalue()
    assert '7   " won␛[2J"' in printed
    assert "0.250" in printed
    assert '"⏎"' in printed
    assert [part.text for part in rejections([]) if isinstance(part, Line)] == [
        "No draft token was rejected."
    ]


def races(*rows: CompareRow) -> list[tuple[str, ...]]:
    """The cells of the page's table."""
    page = races_page([Run([row]) for row in rows])
    if page is None:
        return []
    (table,) = page.full_tables
    return table.shown()[1]


def test_each_race_is_a_row() -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"speedup": 3.0, "acceptance_rate": 0.25},
        {"num_draft_tokens": 2},
        {"regular_ms_per_token": None, "speedup": None},
    ]
    rows = [CompareRow(**ROW | changed) for changed in changes]
    assert [(cells[0], cells[1], *cells[3:]) for cells in races(*rows)] == [
        ("13B with 7B", "4", "2.00×", "75.0 %"),
        ("", "4", "3.00×", "25.0 %"),
        ("", "2", "2.00×", "75.0 %"),
    ]
    assert races(rows[3]) == []
