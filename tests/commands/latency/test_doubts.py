"""The table of doubts: every template can be filled, and every row has an order."""

from __future__ import annotations

import string

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
        assert doubt.text.endswith(".") or doubt.text == "{found}"
