"""From a text to rows of figures and settings by our names, for `audit FILE`, `costs=FILE` and `acceptance=FILE`."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, NamedTuple, TypeVar

from harness.config.errors import SettingError, nearest
from harness.results.printed.cells import Cells, tables_of
from harness.results.printed.columns import PrintedColumn, columns_of
from harness.results.printed.figures import MARKS, SETTINGS, PrintedFigure, is_regular_arm

# K inside the words of an arm: `MTP n=3`, `draft-max 8`, `MTP, block 4`, `5 draft tokens`.
_K_IN_WORDS = re.compile(
    r"[\s,(`]*(?:(?<![\w-])(?:(?:k|n|γ|gamma|mtp)\s*=|(?:n[-_ ]?max|spec-draft-n-max|draft[-_ ]?max|depth|block"
    r"|num_speculative_tokens)\s*[=:\s])\s*(\d{1,2})\b|\b(\d{1,2}) (?:draft|speculative) tokens)[)`]?",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class PrintedRow:
    """What a row states.

    Attributes:
        place: of the row in its text: `row 3`.
        settings: by the names of `SETTINGS`, without empty ones.
        figures: by our names, as far as they are stated.
        k_is_in_words: whether K stands in the words of its arm, `MTP n=3`, and in no column.
        cells: as printed, by heading.
        unread: cells that are no such number, by our name.
    """

    place: str
    settings: Mapping[str, str] = field(default_factory=dict)
    figures: Mapping[str, PrintedFigure] = field(default_factory=dict)
    k_is_in_words: bool = False
    cells: Cells = field(default_factory=dict, repr=False)
    unread: Cells = field(default_factory=dict, repr=False)


RowType = TypeVar("RowType", bound=PrintedRow)


class PrintedTable(NamedTuple, Generic[RowType]):
    """A table, and what its columns were read as, by heading."""

    rows: Sequence[RowType]
    columns: Mapping[str, PrintedColumn]


def read_tables(
    text: str, names: Collection[str], known: Cells, everywhere: RowType
) -> list[PrintedTable[RowType]]:
    """The tables of a text, or the runs of a result file as one.

    Args:
        names: of numbers and settings that are looked for.
        known: some of these by heading, for headings that are not known.
        everywhere: what holds for all rows.

    Raises:
        SettingError: no table has a heading in `known`, or it has a name that is not looked for.
    """
    tables = tables_of(text)
    headings = [heading for table in tables for heading in table[0] if heading]
    for heading, name in known.items():
        if heading not in headings:
            rule = f"no table has this column{nearest(heading, headings)}; there are {', '.join(headings)}"
            raise SettingError("columns", rule, heading)
        if name not in names:
            raise SettingError("columns", f"no such NAME{nearest(name, names)} (--help)", name)
    read = []
    for number, cells in enumerate(tables, start=1):
        columns = columns_of(cells, known, names)
        where = f"table {number}, row" if len(tables) > 1 else "row"
        rows = [
            row_of(f"{where} {place}", row, columns, everywhere)
            for place, row in enumerate(cells, start=1)
        ]
        read.append(PrintedTable(rows, columns))
    return read


def row_of(
    place: str, cells: Cells, columns: Mapping[str, PrintedColumn], everywhere: RowType
) -> RowType:
    """The figures and settings in the cells of a row."""
    settings, figures = dict(everywhere.settings), dict(everywhere.figures)
    unread = {}
    for heading, column in columns.items():
        text, name = cells[heading], column.name
        is_none = text.strip(MARKS).lower() == "n/a"
        if name in SETTINGS and text:
            settings[name] = "none" if name == "draft" and is_none else text
        elif name == "num_draft_tokens" and (is_none or is_regular_arm(text)):
            figures[name] = PrintedFigure(0, 0, text)
        elif name not in SETTINGS:
            try:
                figure = column.read(text)
            except ValueError:
                unread[name] = text
            else:
                figures |= {name: figure} if figure else {}
    k_is_in_words = False
    for name in ("draft", "name"):
        words = settings.get(name, "")
        matches = [*_K_IN_WORDS.finditer(words)]
        # `K=5 / K=3` is ambiguous.
        if len(matches) == 1 and "num_draft_tokens" not in figures and not is_regular_arm(words):
            settings[name] = words.replace(matches[0][0], "").strip()
            k = float(matches[0][1] or matches[0][2])
            figures["num_draft_tokens"] = PrintedFigure(k, k, f"{k:g}")
            k_is_in_words = True
    return replace(
        everywhere,
        place=place,
        settings=settings,
        figures=figures,
        k_is_in_words=k_is_in_words,
        cells=cells,
        unread=unread,
    )
