"""Pages as text."""

from __future__ import annotations

from html.parser import HTMLParser

from harness.reporting.files import ReportContents
from harness.reporting.page import Page, in_full, in_short
from harness.reporting.table import Line
from harness.reporting.terminal import PLAIN_WIDTH, as_text


def short(page: Page | None, width: int = 80) -> str:
    """The page as a run prints it; empty where there is none."""
    return "" if page is None else as_text(in_short(page), width)


def full(page: Page | None, width: int = PLAIN_WIDTH) -> str:
    """The page as `details=true` prints it; empty where there is none."""
    return "" if page is None else as_text(in_full(page), width)


def findings(report: ReportContents) -> list[Line]:
    """The findings of all pages of a report, with what they rest on."""
    pages = [part for page in report.pages.values() for part in (page, *page.parts)]
    lines = [line for page in pages for line in page.finding]
    return [Line(line.whole, line.style) for line in lines]


class Elements(HTMLParser):
    """The elements of a page in HTML: their tags and attributes, and the text of the page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[dict[str, str | None]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes.append(dict(attributes))

    def handle_data(self, data: str) -> None:
        self.text += data

    def values(self, *names: str) -> list[str]:
        """The values of attributes with these names."""
        return [own[name] or "" for own in self.attributes for name in names if name in own]

    def having(self, name: str, value: str) -> list[dict[str, str | None]]:
        """The attributes of elements of which one has this value among others."""
        return [own for own in self.attributes if value in (own.get(name) or "").split()]
