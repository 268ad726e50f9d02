"""Prints documents on a terminal. Names, errors and paths are printed as plain text, never as markup."""

from __future__ import annotations

import io
import itertools
import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import IO, Any

from rich import box
from rich.cells import cell_len
from rich.console import Console, JustifyMethod
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from harness.config.errors import RunError
from harness.reporting.table import Column, Document, Line, Table, in_lines, legend, visible

# The width without a terminal. Output then goes into a file or a pull request, and at this width hardly any table is
# wrapped.
PLAIN_WIDTH = 110
# The width of tables that compare many runs.
WIDE = 132
_STYLES = {
    "plain": "", "strong": "bold", "dim": "dim", "warning": "yellow", "good": "bold green", "bad": "bold red",
}  # fmt: skip
_BOXES = {"box": box.ROUNDED, "plain": box.SIMPLE_HEAD, "bare": None}
# Words of at most this many characters are not broken in a table.
_UNBROKEN = 24
# Characters that the frame and the padding of a column take: one line of the frame, and a space on either side.
_FRAME = 3
# The indent of sentences and of lines with a name.
_INDENT = "  "


class LastingConsole(Console):
    """A console that keeps working when the program that reads its output has ended, as after `| head`.

    Attributes:
        reader_has_left: whether the reader has ended. Further output is then discarded.
    """

    reader_has_left = False

    def on_broken_pipe(self) -> None:
        """Discard any further output. By default, Rich would end the process."""
        self.reader_has_left = True
        discard(self.file)


def discard(stream: IO[str]) -> None:
    """Redirect a stream to the null device, so that further output is discarded without an error. This cannot be
    undone, so the descriptor of the null device is never closed.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _console(**options: Any) -> LastingConsole:
    """A console that prints text as it is, without markup."""
    # Rich also omits colours if NO_COLOR is set but empty. According to https://no-color.org, an empty NO_COLOR has no
    # meaning.
    no_color = bool(os.environ.get("NO_COLOR"))
    return LastingConsole(
        highlight=False,
        markup=False,
        emoji=False,
        no_color=no_color,
        # In a notebook, Rich would show the text in the cell, whichever file it is for.
        force_jupyter=False,
        **options,
    )


def plain_console(width: int = PLAIN_WIDTH, **options: Any) -> LastingConsole:
    """A console without markup, by default on stdout.

    Its width is the first of these that is known: the environment variable `COLUMNS` if it is above 0, the width of
    stdout's terminal, and `width`.
    """
    if "COLUMNS" in os.environ:
        # Rich itself would accept COLUMNS=0 as a width.
        width = shutil.get_terminal_size((width, 0)).columns
    elif sys.stdout.isatty():
        return _console(**options)
    return _console(width=width, **options)


def stderr_console() -> LastingConsole:
    """A console on stderr, for messages. The terminal wraps long lines by itself."""
    return _console(stderr=True, soft_wrap=True)


def print_document(document: Document, console: Console | None = None) -> None:
    """Print tables and sentences, by default on stdout. Tables for reference are left out.

    Raises:
        RunError: if stdout cannot be written, for example because its disk is full.
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
    """The document as `print_document` prints it to a console of this width, without colours and without spaces at the
    ends of lines. The environment variable `COLUMNS` has no effect.
    """
    file = io.StringIO()
    # Without colours even if FORCE_COLOR is set, because the text is for files.
    print_document(document, _console(file=file, width=width, color_system=None))
    return "".join(f"{line.rstrip()}\n" for line in file.getvalue().splitlines())


def _print_text(text: str, style: str, console: Console, more: str = "") -> None:
    """Print a sentence, with `more` next to it or below it.

    A long sentence that consists of more than two parts, separated by ` · `, is broken between parts, unless it is
    indented.
    """
    if more:
        joined = f"{text}     {more}"
        # If there is no room next to the text, `more` is printed below it.
        if cell_len(joined) > console.width:
            text = _filled(text, console)
            joined = f"{text}\n{_filled(f'{_INDENT}{more}', console)}"
        shown = Text(visible(joined))
        shown.stylize(style, 0, len(visible(text)))
        console.print(shown, soft_wrap=True)
        return
    parts = text.split(" · ")
    if text.startswith(_INDENT):
        text = _filled(text, console)
    # The separator takes two more characters of a line: the space and the dot after a part.
    elif len(parts) > 2 and max(map(cell_len, parts)) < console.width - 2:
        text = in_lines(text, console.width)
    # A path that is longer than a line must not be broken, because it could not be copied.
    longest = max(map(len, text.split()), default=0)
    console.print(Text(visible(text), style), soft_wrap=longest > console.width)


def _filled(text: str, console: Console) -> str:
    """The text wrapped to the console's width, without breaking words."""
    return textwrap.fill(
        text,
        console.width,
        subsequent_indent=_INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )


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
        _print_columns(table, columns, rows, console)
    if table.look != "bare" and (meanings := legend(columns)):
        _print_text(meanings, "dim", console)
    for note in table.notes:
        _print_text(note, "dim", console)


def _print_lines(rows: Sequence[Sequence[str]], console: Console) -> None:
    """Print names and values, each name next to the first line of its value."""
    width = max((cell_len(name) for name, _ in rows), default=0)
    for name, value in rows:
        # Two spaces separate a name from its value, which gets some room even if the names are long.
        room = max(_UNBROKEN, console.width - len(_INDENT) - width - 2)
        lines: list[str] = []
        for line in visible(value).split("\n"):
            wrapped = textwrap.wrap(line, room, break_long_words=False, break_on_hyphens=False)
            # A command must stay on one line, so that it can be copied; the terminal wraps it if necessary.
            is_command = line.startswith("harness ")
            lines += [line] if is_command or not line else wrapped
        for index, line in enumerate(lines):
            label = visible(name) if index == 0 else ""
            shown = Text(f"{_INDENT}{label:{width}}  {line}")
            shown.stylize("dim", 0, len(_INDENT) + width)
            console.print(shown, soft_wrap=True)


def _print_columns(
    table: Table, columns: Sequence[Column], rows: Sequence[Sequence[str]], console: Console
) -> None:
    """Print a table with headings.

    Columns at the right for which there is no room are left out. Their names are printed below the table, except below
    a `bare` one.
    """
    is_bare = table.look == "bare"
    margin = 2 * len(_INDENT) if is_bare else 0
    # One character is for the last line of the frame, at the right.
    room = console.width - 1 - margin
    cells_of_columns = zip(*rows, strict=True)
    least = [*map(_least_width, columns, cells_of_columns)]
    # For example, columns of 10, 8 and 30 characters end at 13, 24 and 57. In a room of 40, two are shown.
    ends = itertools.accumulate(width + _FRAME for width in least)
    num_shown = max(1, sum(end <= room for end in ends))
    drawn = RichTable(box=_BOXES[table.look], header_style="dim" if is_bare else "bold")
    if is_bare:
        # Without a frame, as many spaces follow each cell (the padding's sides are top, right, bottom and left).
        drawn.padding = (0, _FRAME, 0, 0)
        drawn.pad_edge = False
    for column in columns[:num_shown]:
        justify: JustifyMethod = "left" if column.text else "right"
        heading = Text(column.heading)
        drawn.add_column(heading, justify=justify, overflow="fold", no_wrap=not column.text)
    for row, cells in zip(table.rows, rows, strict=True):
        style = "bold" if row.strong else "dim" if row.faint else None
        drawn.add_row(*(Text(visible(cell)) for cell in cells[:num_shown]), style=style)
    console.print(Padding(drawn, (0, 0, 0, margin), expand=False))
    left_out = "; ".join(column.name for column in columns[num_shown:])
    if left_out and not is_bare:
        _print_text(f"Without room here: {left_out}.", "dim", console)


def _least_width(column: Column, cells: Sequence[str]) -> int:
    """The fewest characters that a column needs, without its frame: numbers are not broken, and text is broken between
    words.
    """
    text = "\n".join([column.heading, *cells])
    if column.text:
        return min(max(map(cell_len, text.split()), default=0), _UNBROKEN)
    return max(map(cell_len, text.split("\n")))
