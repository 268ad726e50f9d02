"""The elements of pages, tables of values and sentences, which are the same for the terminal, Markdown and HTML.

A command makes tables from items, such as the pairs that were measured:

    columns = [
        Column("pair", of="name.pair", text=True),
        Column("speed-up", times, of="row.speedup.estimate"),
    ]
    table = Table.of("pairs", "Speed-up", pairs, columns, strong="stands_out")

For each pair, the table has a row such as `13B with 7B | 2.31×`, made from `pair.name.pair` and
`times(pair.row.speedup.estimate)`. The row is bold if `pair.stands_out`. A renderer prints the columns and texts that
`table.shown()` returns.
"""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from harness.config.amounts import percent
from harness.results.judging.statement import Relation, Statement

# How to read a value from an item: a function of the item, or a path of attributes, such as `regular.ms_per_token`. If
# the item or any attribute on the path is None, the value is None.
Of = str | Callable[[Any], Any]
Style = Literal["plain", "strong", "dim", "warning", "good", "bad"]
_STYLES: dict[Relation, Style] = {
    "above": "good",
    "below": "bad",
    "open": "strong",
    "lossless": "good",
    "lossy": "bad",
}


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        heading: one or two lines.
        form: makes the text of a cell from a value; None always becomes an empty cell. If the text has several lines,
            the first line is the value, and the others are details.
        of: how the value is read from an item, for `Table.of`.
        text: whether the column is left-aligned; numbers are right-aligned and never broken.
        optional: whether the column is left out if all its cells are empty.
        varies: whether the column is left out if all its cells are equal, because the title names what all rows share.
        once: whether a cell that is equal to the cell above it is left empty.
        reference: for a column of statements, whose intervals the HTML page draws: the value at which a line is drawn,
            such as 1 for speed-ups. None for other columns.
        meaning: an explanation of the heading, printed with the table, if readers may not know it.
    """

    heading: str
    form: Callable[[Any], str] = str
    of: Of = ""
    text: bool = False
    optional: bool = False
    varies: bool = False
    once: bool = False
    reference: float | None = None
    meaning: str = ""

    @property
    def name(self) -> str:
        """The heading in one line: `regular ms/token`."""
        return " ".join(self.heading.replace("-\n", "").split())

    def at(self, path: Of) -> Column:
        """The same column, but read from an attribute of the item.

        For example, `SPEEDUP` reads `item.speedup`, and `SPEEDUP.at("row")` reads `item.row.speedup`.
        """
        return replace(self, of=lambda item: _read(_read(item, path), self.of))


@dataclass(frozen=True)
class TableRow:
    """The values of a row, one for each column. A strong row is bold. A faint row, such as an unfinished measurement,
    is pale.
    """

    cells: tuple[Any, ...]
    strong: bool = False
    faint: bool = False


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        key: name of the table within a report.
        title: the title above the table; empty for none.
        about: a line between the title and the table; empty for none.
        notes: lines below the table.
        for_reference: whether readers only look things up in it. It is then shown only in a report's HTML and Markdown,
            where it opens on a click.
        look: the form on a terminal:
            `box`: a framed table with headings;
            `plain`: headings without a frame;
            `bare`: the short table of a page, whose last columns are left out without a word if they have no room;
            `lines`: names and values, without headings.
    """

    key: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[TableRow, ...]
    about: str = ""
    notes: tuple[str, ...] = ()
    for_reference: bool = False
    look: Literal["box", "plain", "bare", "lines"] = "box"

    @classmethod
    def of(
        cls,
        key: str,
        title: str,
        items: Iterable[Any],
        columns: Sequence[Column],
        strong: Of = lambda item: False,
        faint: Of = lambda item: False,
        **details: Any,
    ) -> Self:
        """Make a table with a row for each item. The columns read the cells from the item.

        Args:
            strong, faint: how to read from an item whether its row is strong, or faint.
            details: the other fields of the table.
        """
        rows = []
        for item in items:
            cells = tuple(_read(item, column.of) for column in columns)
            rows.append(TableRow(cells, _read(item, strong), _read(item, faint)))
        return cls(key, title, tuple(columns), tuple(rows), **details)

    @classmethod
    def from_lines(cls, key: str, lines: Iterable[tuple[str, str | None]]) -> Self:
        """Make a table, without a title, of names and values, one pair per line. Lines without a value are left out. A
        name that is equal to the name above it is left empty.
        """
        rows = tuple(TableRow(line) for line in lines if line[1])
        columns = (Column("", text=True, once=True), Column("", text=True))
        return cls(key, "", columns, rows, look="lines")

    def first(self, num_rows: int) -> Table:
        """The table with at most `num_rows` rows, and with a note if rows were left out."""
        if len(self.rows) <= num_rows:
            return self
        note = f"The first {num_rows:,} of {len(self.rows):,} rows; the CSV files have all."
        return replace(self, rows=self.rows[:num_rows], notes=(note, *self.notes))

    def shown(self) -> tuple[list[Column], list[tuple[str, ...]]]:
        """The columns to be shown, without those left out by `optional` or `varies`; and, for each row, the texts of
        its cells in these columns.
        """
        columns = []
        texts = []
        for index, column in enumerate(self.columns):
            values = [row.cells[index] for row in self.rows]
            cells = ["" if value is None else column.form(value) for value in values]
            if (column.optional and not any(cells)) or (column.varies and len(set(cells)) < 2):
                continue
            if column.once:
                pairs = zip(cells, ["", *cells], strict=False)
                cells = ["" if cell == above else cell for cell, above in pairs]
            columns.append(column)
            texts.append(cells)
        return columns, list(zip(*texts, strict=True))


@dataclass(frozen=True)
class Line:
    """A sentence.

    Attributes:
        more: a detail after the text: in plain style on a terminal, otherwise in parentheses.
    """

    text: str
    style: Style = "plain"
    more: str = ""

    @property
    def whole(self) -> str:
        return f"{self.text} ({self.more})" if self.more else self.text


def sentences(style: Style, *texts: str | None) -> list[Line]:
    """Make sentences in one style; empty texts and None are left out."""
    return [Line(text, style) for text in texts if text]


def _read(item: Any, of: Of) -> Any:
    """Read a value from an item, as `Of` describes."""
    if callable(of):
        return None if item is None else of(item)
    for name in of.split("."):
        item = None if item is None else getattr(item, name)
    return item


# Tables and sentences, in reading order.
Document = Sequence[Table | Line]


# Characters that would control a terminal, and the characters that are printed in their place: ESC becomes ␛.
_PICTURES: dict[int, str] = {code: chr(0x2400 + code) for code in range(32)}
# The delete character, and characters that begin control sequences on some terminals.
_PICTURES |= dict.fromkeys(range(127, 160), "␡")
# Line ends and tabs are harmless.
_PICTURES |= {ord(space): space for space in "\n\t"}
# These change the direction of writing, even for the text after them.
_PICTURES |= dict.fromkeys([*range(0x202A, 0x202F), *range(0x2066, 0x206A)], "�")


def visible(text: str) -> str:
    """The text, with pictures in place of characters that would control a terminal."""
    return text.replace("\r\n", "\n").translate(_PICTURES)


def in_lines(text: str, width: int) -> str:
    """Wrap a text of settings, which are separated by ` · `. Lines end between two settings if possible, and names such
    as Llama-3.2-1B are not broken.
    """
    parts = [part.replace(" ", "\N{NO-BREAK SPACE}") for part in text.split(" · ")]
    lines = textwrap.fill(" · ".join(parts), width, break_on_hyphens=False)
    return lines.replace("\N{NO-BREAK SPACE}", " ")


def legend(columns: Sequence[Column]) -> str:
    """The meanings of headings, for columns that have one: `c: time of a draft token; v: …`; empty if no column has
    one.
    """
    return "; ".join(f"{column.name}: {column.meaning}" for column in columns if column.meaning)


def style_of(statement: Statement) -> Style:
    """The style for the sentence of a statement."""
    return _STYLES[statement.relation]


def stated(statement: Statement) -> str:
    """The interval of a statement about a speed-up, as text: `2.31× (2.18 to 2.42)`."""
    return f"{statement.interval:×}"


# Functions that format numbers: `2.31×`, `83.4 %`, and for an `Interval` `2.31× (2.18 to 2.42)`.
times = "{:.2f}×".format
share = functools.partial(percent, digits=1)
with_bounds = "{:×}".format


def number(digits: int = 2) -> Callable[[float], str]:
    """A function that formats numbers with this many decimals, such as `12.34`."""
    return f"{{:.{digits}f}}".format
