"""The table of doubts: every template can be filled, and every row has an order."""

from __future__ import annotations

import string
from pathlib import Path

from harness.commands.latency.tables.doubts import DOUBTS
from harness.measuring.rows import LatencyRow


def test_templates_name_what_there_is() -> None:
    for doubt in DOUBTS:
        for _, field, _, _ in string.Formatter().parse(doubt.text):
            if field is None:
                continue
            name, _, attribute = field.partition(".")
            assert name in ("row", "found"), doubt.text
            assert name == "found" or attribute in LatencyRow.columns(), doubt.text


def test_sentences_are_sentences() -> None:
    for doubt in DOUBTS:
        assert doubt.text.endswith((".", "{found}"))


PAGE = Path(__file__).parents[3] / "docs" / "messages.md"


def explained(heading: str) -> list[str]:
    """The first cells of the table below a heading of the page."""
    _, _, section = PAGE.read_text(encoding="utf-8").partition(f"\n## {heading}\n")
    lines = section.partition("\n## ")[0].splitlines()
    return [line.split(" | ")[0].removeprefix("| ") for line in lines if line.startswith("| ")][1:]


def test_the_page_of_messages_explains_each_of_them_and_no_other() -> None:
    left = {heading: explained(heading) for heading in ("Warnings", "Notes")}
    for doubt in DOUBTS:
        fields = string.Formatter().parse(doubt.text)
        pieces = [text.strip(" .,:;()") for text, *_ in fields]
        rows = left["Warnings" if "against" in doubt.rank else "Notes"]
        [row] = [row for row in rows if all(piece in row for piece in pieces)]
        rows.remove(row)
    assert left == {"Warnings": [], "Notes": []}
