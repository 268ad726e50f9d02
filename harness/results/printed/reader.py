"""From a text to rows of figures by our names, for `audit FILE`, `costs=FILE` and `acceptance=FILE`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from harness.config.errors import SettingError
from harness.results.printed.cells import Cells, tables_of
from harness.results.printed.headings import (
    ARM,
    CONDITION,
    REGULAR,
    UNUSED,
    PrintedColumn,
    columns_of,
)
from harness.results.printed.rows import PrintedRow


class PrintedTable(NamedTuple):
    """A table, and what its columns were read as, by heading."""

    rows: Sequence[PrintedRow]
    columns: Mapping[str, PrintedColumn]


def read_tables(
    setting: str,
    text: str,
    names: Collection[str],
    named: Cells | None = None,
    regular_arm: str = "",
    regular_file: str = "",
) -> list[PrintedTable]:
    """The tables of a text, or the runs of a result file as one.

    Args:
        setting: what a user has typed the text, or its path, for.
        names: of columns that are looked for.
        named: some of these by heading, which the user names.
        regular_arm: a cell that names the regular arm.
        regular_file: a result file of runs without drafts, whose rows follow.

    Raises:
        SettingError: a cell of a column that is known is no such number.
    """
    tables = tables_of(text, regular_file)
    read = []
    for number, rows in enumerate(tables, start=1):
        columns = columns_of(rows, names, named or {})
        where = f"table {number}, row" if len(tables) > 1 else "row"
        printed = []
        for place, cells in enumerate(rows, start=1):
            try:
                printed.append(_row(f"{where} {place}", cells, columns, regular_arm))
            except ValueError as error:
                rule = f"{where} {place} is not understood: {error}"
                raise SettingError(
                    setting, f"{rule}; correct it or leave that column out"
                ) from error
        read.append(PrintedTable(printed, columns))
    return read


def _row(
    place: str, cells: Cells, columns: Mapping[str, PrintedColumn], regular_arm: str
) -> PrintedRow:
    """Raises ValueError for a cell that is no such number."""
    row = PrintedRow(place, cells=cells)
    for heading, column in columns.items():
        text = cells[heading]
        if text and text == regular_arm:
            row.arms.append(REGULAR)
        elif column.name == ARM and text:
            row.arms.append(text)
        elif column.name == CONDITION:
            row.conditions[heading] = text
        elif column.name not in (ARM, UNUSED):
            try:
                figure = column.read(text)
            except ValueError as error:
                raise ValueError(f"{heading} is {text[:40]}, which {error}") from error
            if figure:
                row.figures[column.name] = figure
    return row
