"""Pages as text, and what holds for the statements of any page."""

import re
from collections.abc import Sequence
from html.parser import HTMLParser

from harness.reporting.page import Page, in_full, in_short
from harness.reporting.terminal import PLAIN_WIDTH, as_text
from harness.results.judging.statement import Statement


def short(page: Page | None, width: int = 80) -> str:
    """The page as a run prints it; empty where there is none."""
    return "" if page is None else as_text(in_short(page), width)


def full(page: Page | None, width: int = PLAIN_WIDTH) -> str:
    """The page as `details=true` prints it, without the lines of every figure; empty where there is none."""
    return "" if page is None else without_figures(as_text(in_full(page), width))


def without_figures(text: str) -> str:
    """The text of a page without the lines of *Every figure*, which are as many as a row has columns."""
    return re.sub(r"(?<=Every figure\n)\s*\n(?:.*\S.*\n)+", "", text)


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


def incoherent(statements: Sequence[Statement]) -> list[str]:
    """Return what is wrong: a conclusion against a reason or without bounds, a reason that is missing, or statements
    about one reference that are read together and do not have one family.
    """
    wrong = []
    families: dict[int, set[int]] = {}
    for statement in statements:
        is_founded = statement.interval.has_bounds or statement.evidence
        if statement.is_conclusion and (statement.why or not is_founded):
            wrong.append(f"a conclusion without a foundation: {statement}")
        if not statement.is_conclusion and not (statement.why or statement.interval.has_bounds):
            wrong.append(f"open without bounds or a reason: {statement}")
        # Those about one reference are read together, and all changes.
        row = statement.subject if statement.reference is None else statement.reference
        reading = id(row) if statement.kind in ("pays", "compared") else 0
        if statement.kind in ("pays", "compared", "changed", "margin"):
            families.setdefault(reading, set()).add(statement.family)
    compared_with = {id(statement.reference) for statement in statements if statement.reference}
    for reading in families.keys() & {0, *compared_with}:
        if len(families[reading]) > 1:
            wrong.append(f"several families: {families[reading]}")
    return wrong
