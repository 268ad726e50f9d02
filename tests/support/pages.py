"""Pages as text."""

from __future__ import annotations

from harness.reporting.files import Report
from harness.reporting.page import Page, in_full, in_short
from harness.reporting.table import Line
from harness.reporting.terminal import PLAIN_WIDTH, as_text


def short(page: Page | None, width: int = 80) -> str:
    """The page as a run prints it; empty where there is none."""
    return "" if page is None else as_text(in_short(page), width)


def full(page: Page | None, width: int = PLAIN_WIDTH) -> str:
    """The page as `details=true` prints it; empty where there is none."""
    return "" if page is None else as_text(in_full(page), width)


def findings(report: Report) -> list[Line]:
    """The findings of all pages of a report, with what they rest on."""
    lines = [line for page in report.pages.values() for line in page.finding]
    return [Line(line.whole, line.style) for line in lines]
