"""From a text to rows of figures by our names, for `audit FILE`, `costs=FILE` and `acceptance=FILE`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from harness.config.errors import SettingError
from harness.results.printed.cells import Cells, tables_of
from harness.results.printed.figures import PrintedFigure
from harness.results.printed.headings import ARM, CONDITION, UNUSED, PrintedColumn, columns_of


@dataclass(frozen=True)
class PrintedRow:
    """The contents of a row.

    Attributes:
        place: of the row in its text: `row 3`.
        figures: by our names, as far as they are stated.
        arms: cells that name its arm.
        conditions: cells that rows must share to be compared, by heading.
        cells: as printed, by heading.
    """

    place: str
    figures: Mapping[str, PrintedFigure] = field(default_factory=dict)
    arms: Sequence[str] = ()
    conditions: Cells = field(default_factory=dict)
    cells: Cells = field(default_factory=dict, repr=False)


class PrintedTable(NamedTuple):
    """A table, and what its columns were read as, by heading."""

    rows: Sequence[PrintedRow]
    columns: Mapping[str, PrintedColumn]


def read_tables(
    setting: str, text: str, names: Collection[str], named: Cells | None = None
) -> list[PrintedTable]:
    """The tables of a text, or the runs of a result file as one.

    Args:
        setting: what a user has typed the text, or its path, for.
        names: of columns that are looked for.
        named: some of these by heading, which the user names.

    Raises:
        SettingError: a cell of a column that is known is no such number.
    """
    tables = tables_of(text)
    read = []
    for number, rows in enumerate(tables, start=1):
        columns = columns_of(rows, names, named or {})
        where = f"table {number}, row" if len(tables) > 1 else "row"
        printed = [
            _row(setting, f"{where} {place}", cells, columns)
            for place, cells in enumerate(rows, start=1)
        ]
        read.append(PrintedTable(printed, columns))
    return read


def _row(
    setting: str, place: str, cells: Cells, columns: Mapping[str, PrintedColumn]
) -> PrintedRow:
    figures: dict[str, PrintedFigure] = {}
    arms, conditions = [], {}
    for heading, column in columns.items():
        text = cells[heading]
        if column.name == ARM:
            arms.append(text)
        elif column.name == CONDITION:
            conditions[heading] = text
        elif column.name != UNUSED:
            try:
                figure = column.read(text)
            except ValueError as error:
                rule = f"{place} is not understood: {heading} is {text[:40]}, which {error}"
                raise SettingError(
                    setting, f"{rule}; correct it or leave that column out"
                ) from error
            figures |= {column.name: figure} if figure else {}
    return PrintedRow(place, figures, [*filter(None, arms)], conditions, cells)
