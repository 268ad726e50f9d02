"""CSV files of typed rows: writes rows, appends rows to those of other runs, and reads rows.

`locked_files` keeps the files whole if several processes write them, or if a process is killed.
"""

from __future__ import annotations

import csv
import io
import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from harness.results.locked_files import locked, read_whole, replace_file
from harness.results.row import Row, kind_of

# The file with the whole page of a result as text, in the directory of the run or sweep.
SUMMARY_FILE = "summary.txt"

AnyRow = TypeVar("AnyRow", bound=Row)


@dataclass(frozen=True)
class Contents:
    """The contents of a CSV file.

    Attributes:
        kind: kind of the rows; None for a file that harness did not write.
        rows: the rows that are complete.
        torn: a line about each row that was left out because cells are missing or a setting cannot be read, such as
            `results/latency.csv, line 7: 12 of 140 cells; left out`.
        unread: a line about each row with figures that cannot be read as their columns' types; these figures are None.
    """

    kind: type[Row] | None
    rows: list[Row]
    torn: list[str]
    unread: Sequence[str] = ()


def write_rows(path: str | Path, rows: Sequence[Row]) -> None:
    """Write rows of one kind to a CSV file, as `replace_file` does. Without rows, nothing is written."""
    if rows:
        replace_file(path, as_csv(rows))


def append_rows(path: str | Path, rows: Sequence[Row]) -> Path:
    """Append rows of one kind to a CSV file that several processes share. Either all rows are appended, or none.

    The directory is created if necessary. A file with other columns, or one that ends inside a quoted cell, is not
    changed. The rows are then appended to the first of `<stem>-2.csv`, `<stem>-3.csv` and so on that has the same
    columns, in any order, or that is empty or does not exist yet.

    Returns:
        The file to which the rows were appended; `path` if there are no rows.

    Raises:
        SettingError: if no file can be written at this path. The error names `results.file`, because this setting is
            the usual source of the path.
        RunError: if the disk itself fails, or another process holds the lock. The file then has its old content, or all
            rows.
    """
    path = Path(path)
    # Ends at the first file that takes the rows.
    for candidate in _numbered(path) if rows else ():
        with locked(candidate, "results.file") as file:
            if not file.path.exists() or not file.path.stat().st_size:
                file.replace(as_csv(rows))
                return candidate
            header = _header(file.path)
            if sorted(header) != sorted(rows[0].cells()):
                continue
            content = file.path.read_bytes()
            if content.count(b'"') % 2:
                # The file ends inside a quoted cell. Rows appended to it would become a part of that cell.
                continue
            # An editor may have removed the line break at the end of the last line.
            line_end = b"" if content.endswith(b"\n") else b"\n"
            file.append(line_end + _as_csv([_cells(row, header) for row in rows]))
            return candidate
    return path


def read_rows(path: str | Path, kind: type[AnyRow]) -> list[AnyRow]:
    """The rows of one kind in a shared CSV file and its numbered siblings (`latency-2.csv`, ...), up to the first
    number without a file; [] if there is no file. Rows that cannot be read are left out.

    Raises:
        OSError: if a file cannot be read.
    """
    files = itertools.takewhile(Path.exists, _numbered(Path(path)))
    return [row for file in files for row in rows_in(file, kind)]


def rows_in(path: Path, kind: type[AnyRow]) -> list[AnyRow]:
    """The rows of one kind in one CSV file; [] if there is no file.

    Raises:
        OSError: if the file cannot be read.
    """
    if not path.exists():
        return []
    return [row for row in read_file(path, [kind]).rows if isinstance(row, kind)]


def read_file(path: Path, kinds: Iterable[type[Row]]) -> Contents:
    """Read one CSV file: the rows that are complete, and lines about the others.

    Args:
        kinds: the kinds of rows that the file may contain.

    Raises:
        OSError: if the file cannot be read.
    """
    # A prompt may be longer than the csv module's default limit of 131,072 characters.
    csv.field_size_limit(sys.maxsize)
    text = read_whole(path).decode("utf-8-sig", errors="replace")
    reader = csv.reader(io.StringIO(text, newline=""))
    header: list[str] = next(reader, [])
    kind = kind_of(header, kinds)
    if kind is None:
        return Contents(None, [], [])
    columns = kind.columns()
    rows: list[Row] = []
    torn = []
    unread = []
    for cells in reader:
        line = f"{path}, line {reader.line_num}"
        if cells == header:
            # Files that were joined repeat the header.
            continue
        if len(cells) == len(header):
            named = dict(zip(header, cells, strict=True))
            row = kind.parse(named)
            # Columns whose cell has text, but no readable value.
            lost = [
                name
                for name, cell in named.items()
                if cell not in ("", "nan") and name in columns and columns[name].of(row) is None
            ]
            damage = f"{line}: {', '.join(lost)} cannot be read"
            if any(columns[name].kind == "setting" for name in lost):
                # Without a setting such as K, the row could be mistaken for a row with another setting.
                torn.append(f"{damage}; left out")
                continue
            rows.append(row)
            if lost:
                unread.append(damage)
        elif cells:
            torn.append(f"{line}: {len(cells)} of {len(header)} cells; left out")
    return Contents(kind, rows, torn, unread)


def read_kind(path: Path, kinds: Iterable[type[Row]]) -> type[Row] | None:
    """The kind of row that a CSV file contains, according to its columns; None if the file is of another kind.

    Raises:
        OSError: if the file cannot be read.
    """
    return kind_of(_header(path), kinds)


def check_appendable(path: str | Path) -> None:
    """Before hours of measuring, raise the error that `append_rows` would raise if it appended to this very file. The
    directory is created.
    """
    with locked(path, "results.file") as file:
        file.check_writable()


def _header(path: Path) -> list[str]:
    """The columns of a CSV file."""
    csv.field_size_limit(sys.maxsize)
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as text:
        return next(csv.reader(text), [])


def _numbered(path: Path) -> Iterator[Path]:
    """Yield `latency.csv`, `latency-2.csv`, `latency-3.csv` and so on, without end."""
    yield path
    for number in itertools.count(2):
        yield path.with_name(f"{path.stem}-{number}{path.suffix}")


def as_csv(rows: Sequence[Row]) -> bytes:
    """Write rows of one kind as CSV with a header; there must be at least one row."""
    header = list(rows[0].cells())
    return _as_csv([header, *(_cells(row, header) for row in rows)])


def _cells(row: Row, header: Sequence[str]) -> list[Any]:
    """The cells of a row in the order of a header; empty for unknown values."""
    cells = row.cells()
    values = [cells.get(name) for name in header]
    # Only nan differs from itself.
    return ["" if value is None or value != value else value for value in values]


def _as_csv(lines: Sequence[Sequence[Any]]) -> bytes:
    """Lines of cells as the bytes of a CSV file."""
    # Before Python 3.13, the csv module does not quote a cell because of a lone carriage return, and readers mistake it
    # for the end of the row.
    has_return = any("\r" in str(cell) for cells in lines for cell in cells)
    quoting: Any = csv.QUOTE_NONNUMERIC if has_return else csv.QUOTE_MINIMAL
    text = io.StringIO()
    csv.writer(text, lineterminator="\n", quoting=quoting).writerows(lines)
    # A path from the command line may contain bytes that are not text. They are escaped, so that the row is not lost.
    return text.getvalue().encode("utf-8", errors="backslashreplace")
