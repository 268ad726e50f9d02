"""Documents on a terminal. Names, errors and paths are printed as plain text, never as markup."""

from __future__ import annotations

import io
import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import IO, Any

from rich import box
from rich.cells import cell_len
from rich.console import Console, JustifyMethod
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from harness.config.errors import RunError
from harness.reporting.table import Column, Document, Line, Table, in_lines, legend, naming, visible

# Without a terminal the tables go into a file or a pull request: wide enough not to wrap.
PLAIN_WIDTH = 110
# The width of tables that compare many runs.
WIDE = 132
_STYLES = {
    "plain": "", "strong": "bold", "dim": "dim", "warning": "yellow", "good": "bold green", "bad": "bold red",
}  # fmt: skip
_BOXES = {"box": box.ROUNDED, "plain": box.SIMPLE_HEAD, "bare": None}
# Cells up to this length are not broken, in columns of numbers and of text.
_UNBROKEN = 24
_UNBROKEN_TEXT = 14
# Characters beside each column: its frame and padding.
_FRAME = 3
# Answers, and lines with a name, begin here.
_INDENT = "  "


class LastingConsole(Console):
    """A console that survives the end of its reader, as of `| head`.

    Attributes:
        reader_has_left: whether the reader has ended, so that nothing more is printed.
    """

    reader_has_left = False

    def on_broken_pipe(self) -> None:
        """Discard any further output. Rich itself would end the process."""
        self.reader_has_left = True
        discard(self.file)


def discard(stream: IO[str]) -> None:
    """Discard any further output of a stream, without an error."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _console(**options: Any) -> LastingConsole:
    """A console that prints text as it is, without markup."""
    # Rich obeys a NO_COLOR that is set but empty; by https://no-color.org an empty one means nothing.
    no_color = bool(os.environ.get("NO_COLOR"))
    return LastingConsole(highlight=False, markup=False, emoji=False, no_color=no_color, **options)


def plain_console(width: int = PLAIN_WIDTH, **options: Any) -> LastingConsole:
    """A console without markup, by default on stdout, as wide as stdout's terminal, or as `COLUMNS`; this wide where
    there is neither, or `COLUMNS` is 0.
    """
    if "COLUMNS" in os.environ:
        # Rich itself would take COLUMNS=0 for a width.
        width = shutil.get_terminal_size((width, 0)).columns
    elif sys.stdout.isatty():
        return _console(**options)
    return _console(width=width, **options)


def stderr_console() -> LastingConsole:
    """Stderr, for messages that the terminal itself wraps."""
    return _console(stderr=True, soft_wrap=True)


def print_document(document: Document, console: Console | None = None) -> None:
    """Print tables and sentences, by default on stdout, without tables for reference.

    Raises:
        RunError: the disk behind stdout is full, for example.
    """
    console = console or plain_console()
    try:
        for part in document:
            if isinstance(part, Line):
                _print_text(part.text, _STYLES[part.style], console, part.more)
            elif not part.for_reference:
                _print_table(part, console)
    except OSError as error:
        discard(console.file)
        raise RunError(f"stdout cannot be written: {error.strerror}") from error


def as_text(document: Document, width: int = PLAIN_WIDTH) -> str:
    """The document as `print_document` prints it where there is no terminal."""
    file = io.StringIO()
    # Without colours even where FORCE_COLOR asks for them: this is for files.
    print_document(document, _console(file=file, width=width, color_system=None))
    return "".join(f"{line.rstrip()}\n" for line in file.getvalue().splitlines())


def _print_text(text: str, style: str, console: Console, more: str = "") -> None:
    """Print a sentence, broken between its parts if it has several, and `more` beside it or below it."""
    if more:
        joined = f"{text}     {more}"
        # Below the text where there is no room beside it.
        if cell_len(joined) > console.width:
            text = textwrap.fill(
                text, console.width, subsequent_indent=_INDENT, break_long_words=False
            )
            joined = f"{text}\n{textwrap.fill(more, console.width, initial_indent=_INDENT, subsequent_indent=_INDENT)}"
        shown = Text(visible(joined))
        shown.stylize(style, 0, len(visible(text)))
        console.print(shown, soft_wrap=True)
        return
    parts = text.split(" · ")
    if len(parts) > 2 and max(map(cell_len, parts)) < console.width - 2:
        text = in_lines(text, console.width)
    if text.startswith(_INDENT):
        text = textwrap.fill(text, console.width, subsequent_indent=_INDENT, break_long_words=False)
    # A path longer than a line is of no use in pieces.
    longest = max(map(len, text.split()), default=0)
    console.print(Text(visible(text), style), soft_wrap=longest > console.width)


def _print_table(table: Table, console: Console) -> None:
    if table.title:
        console.print()
        _print_text(table.title, "bold", console)
    if table.about:
        _print_text(table.about, "dim", console)
    columns, rows = table.shown()
    if table.look == "lines":
        _print_lines(rows, console)
    else:
        _print_parts(table, columns, rows, console)
    if table.look != "bare" and (meanings := legend(columns)):
        _print_text(meanings, "dim", console)
    for note in table.notes:
        _print_text(note, "dim", console)


def _print_lines(rows: Sequence[Sequence[str]], console: Console) -> None:
    """Names and values."""
    width = max((cell_len(name) for name, _ in rows), default=0)
    for name, value in rows:
        room = max(_UNBROKEN, console.width - len(_INDENT) - width - 2)
        lines: list[str] = []
        for line in visible(value).split("\n"):
            wrapped = textwrap.wrap(line, room, break_long_words=False, break_on_hyphens=False)
            # A command that is cut in two cannot be copied: the terminal breaks it.
            is_command = line.startswith("harness ")
            lines += [line] if is_command or not line else wrapped
        for index, line in enumerate(lines):
            label = visible(name) if index == 0 else ""
            shown = Text(f"{_INDENT}{label:{width}}  {line}")
            shown.stylize("dim", 0, len(_INDENT) + width)
            console.print(shown, soft_wrap=True)


def _print_parts(
    table: Table, columns: Sequence[Column], rows: Sequence[Sequence[str]], console: Console
) -> None:
    """A table with headings, in as many parts below each other as the console's width takes. Of a bare table only the
    first part: columns without room are left out.
    """
    wants = []
    for index, column in enumerate(columns):
        cells_of_column = [cells[index] for cells in rows]
        wants.append(_width(column, cells_of_column, console))
    is_bare = table.look == "bare"
    margin = 2 * len(_INDENT) if is_bare else 0
    room = console.width - 1 - margin
    least = [want.minimum for want in wants]
    if is_bare:
        least = [max(want.minimum, min(want.maximum, _UNBROKEN)) for want in wants]
    parts = _parts(columns, least, room)
    for part in parts[:1] if is_bare else parts:
        drawn = RichTable(box=_BOXES[table.look], header_style="dim" if is_bare else "bold")
        if is_bare:
            drawn.padding = (0, _FRAME, 0, 0)
            drawn.pad_edge = False
        widths = _shared(room, [wants[index] for index in part])
        for index, width in zip(part, widths, strict=True):
            column = columns[index]
            justify: JustifyMethod = "left" if column.text else "right"
            drawn.add_column(Text(column.heading), justify=justify, overflow="fold", width=width)
        for row, cells in zip(table.rows, rows, strict=True):
            style = "bold" if row.strong else "dim" if row.faint else None
            drawn.add_row(*(Text(visible(cells[index])) for index in part), style=style)
        console.print(Padding(drawn, (0, 0, 0, margin), expand=False))


def _width(column: Column, cells: Sequence[str], console: Console) -> Measurement:
    """How many characters a column needs: at least, so that numbers and words in headings stay whole, and at most, so
    that nothing is broken.
    """
    heading = Measurement.get(console, console.options, Text(column.heading))
    longest = Measurement.get(console, console.options, Text("\n".join(cells))).maximum
    unbroken = min(longest, _UNBROKEN_TEXT if column.text else _UNBROKEN)
    return Measurement(max(unbroken, heading.minimum), max(longest, heading.maximum))


def _shared(room: int, wants: Sequence[Measurement]) -> list[int]:
    """The widths of columns side by side. Too wide, the one that can spare most gets narrower."""
    widths = [want.maximum for want in wants]
    spare = [want.span for want in wants]
    while sum(widths) + _FRAME * len(widths) > room and max(spare):
        index = spare.index(max(spare))
        widths[index] -= 1
        spare[index] -= 1
    return widths


def _parts(columns: Sequence[Column], least: Sequence[int], room: int) -> list[list[int]]:
    """The parts that a table is printed in: places of the columns that fit side by side.

    Each part begins with the columns that say what a row is: [[0, 1, 2, 3], [0, 1, 4, 5]].

    Args:
        least: the narrowest width of each column.
        room: the width of the console.
    """
    widths = [width + _FRAME for width in least]
    names = [*range(len(naming(columns)))]
    # Names take half of the room at most, so that the other half can say something about them.
    while len(names) > 1 and 2 * sum(widths[place] for place in names) > room:
        names.pop()
    parts = [list(names)]
    for index in range(len(names), len(columns)):
        part = parts[-1]
        is_full = sum(widths[other] for other in (*part, index)) > room
        if is_full and len(part) > len(names):
            part = list(names)
            parts.append(part)
        part.append(index)
    return parts
