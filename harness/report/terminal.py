"""Documents on a terminal. Names, errors and paths are printed as plain text, never as markup."""

from __future__ import annotations

import io
import os
import sys
from typing import IO

from rich import box
from rich.console import Console, JustifyMethod
from rich.table import Table as RichTable
from rich.text import Text

from harness.config.errors import RunError
from harness.report.table import Document, Line, Table, visible

# Without a terminal the tables go into a file or a pull request: wide enough not to wrap.
PLAIN_WIDTH = 110
# Of tables that compare many runs.
WIDE = 132
_STYLES = {
    "plain": "", "strong": "bold", "dim": "dim", "warning": "yellow", "good": "bold green", "bad": "bold red",
}  # fmt: skip
# Longest cell of numbers that must not be broken.
_UNBROKEN = 16


class LastingConsole(Console):
    """A console whose command goes on when the reader of its output ends (`| head`), and can know it by `unread`."""

    unread = False

    def on_broken_pipe(self) -> None:
        """Print nothing more. Rich would end the process."""
        self.unread = True
        discard(self.file)


def prepare_streams() -> None:
    """Make the standard streams usable: closed ones lead nowhere, and what stdout cannot encode becomes `?`."""
    # Else the next file that is opened would take the place of stdout.
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", encoding="utf-8", closefd=False))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def discard(stream: IO[str]) -> None:
    """Discard any further output of a stream, without an error."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def plain_console(width: int = PLAIN_WIDTH) -> Console:
    """Stdout, as wide as the terminal; this wide where it is none."""
    return LastingConsole(highlight=False, markup=False, emoji=False, width=None if sys.stdout.isatty() else width)


def print_document(document: Document, console: Console | None = None) -> None:
    """Print tables and sentences, by default on stdout; tables in full are only for files.

    Raises:
        RunError: the disk behind stdout is full, for example.
    """
    console = console or plain_console()
    try:
        for part in document:
            if isinstance(part, Line):
                _print_text(part.text, _STYLES[part.style], console)
            elif not part.in_full:
                _print_table(part, console)
    except OSError as error:
        discard(console.file)
        raise RunError(f"stdout cannot be written: {error.strerror}") from error


def _print_text(text: str, style: str, console: Console) -> None:
    # A path longer than a line is of no use in pieces.
    longest = max(map(len, text.split()), default=0)
    console.print(Text(visible(text), style), soft_wrap=longest > console.width)


def _print_table(table: Table, console: Console) -> None:
    if table.title:
        console.print()
        _print_text(table.title, "bold", console)
    if table.about:
        _print_text(table.about, "dim", console)
    console.print(_drawn(table))
    for note in table.notes:
        _print_text(note, "dim", console)


def _drawn(table: Table) -> RichTable:
    columns, rows = table.shown()
    if table.look == "lines":
        drawn = RichTable.grid(padding=(0, 2))
        drawn.add_column(style="dim", no_wrap=True)
        drawn.add_column()
    else:
        drawn = RichTable(box=box.ROUNDED if table.look == "box" else box.SIMPLE_HEAD)
        for place, column in enumerate(columns):
            longest = max((len(line) for cells in rows for line in cells[place].split("\n")), default=0)
            whole = not column.text and longest <= _UNBROKEN
            justify: JustifyMethod = "left" if column.text else "right"
            drawn.add_column(Text(column.heading), justify=justify, overflow="fold", no_wrap=whole)
    for row, cells in zip(table.rows, rows, strict=True):
        style = "bold" if row.strong else "dim" if row.faint else None
        drawn.add_row(*(Text(visible(cell)) for cell in cells), style=style)
    return drawn
