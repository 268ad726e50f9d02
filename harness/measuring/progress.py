"""Messages and progress of a command, all on stderr: stdout is for results.

On a terminal there is one *live line*: it shows the current activity, and the next activity replaces it. A job of a
sweep writes its messages into a file, and draws its live line on the terminal of the sweep.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import IO

from harness.reporting.table import visible
from harness.reporting.terminal import stderr_console

# Characters of the bar.
_BAR = 20
# This logger writes to the run's log.txt.
_log = logging.getLogger("harness")
# Moves to the beginning of the line, and clears it.
_CLEAR = "\r\x1b[2K"

# Without a terminal, a line about the progress is printed after this many seconds without any printed line.
_SILENT_S = 60.0
_last_printed = time.monotonic()

# For a job of a sweep: the terminal of the sweep, and the text that precedes the job's live line there. Otherwise None
# and empty.
_sweep_terminal: IO[str] | None = None
_prefix = ""
# If a command is called from Python, its messages are written only into files.
_is_quiet = False


class LogFile(logging.FileHandler):
    """A log that stops without a traceback if the disk is full; writing the results reports the full disk."""

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Do nothing. `logging` calls it for an error in `emit`, and would print a traceback."""


def live_on(terminal: IO[str] | None, prefix: str) -> None:
    """From now on, draw the live line on this terminal, with the text `prefix` before it; None for stderr, if that is a
    terminal.
    """
    global _sweep_terminal, _prefix
    _sweep_terminal = terminal
    _prefix = prefix


@contextmanager
def quiet(is_quiet: bool) -> Iterator[None]:
    """If `is_quiet`, write no message on stderr within the block."""
    global _is_quiet
    _is_quiet = is_quiet
    try:
        yield
    finally:
        _is_quiet = False


def say(message: str) -> None:
    """Print a message that stays, and log it."""
    _log.info(message)
    show("")
    _print(message)


def note(message: str) -> None:
    """Show a message about the current activity, and log it: on a terminal in the live line, otherwise as a printed
    line. A job of a sweep shows it in both ways: in the sweep's live line, and as a line of the job's own file.
    """
    _log.info(message)
    if sys.stderr.isatty() or _sweep_terminal is not None:
        show(message)
    if not sys.stderr.isatty():
        _print(message)


def _print(message: str) -> None:
    global _last_printed
    _last_printed = time.monotonic()
    if not _is_quiet:
        stderr_console().print(message, style="dim")


def show(text: str) -> None:
    """Show this text in the live line, or clear the line if it is empty; does nothing without a terminal."""
    terminal = _sweep_terminal or sys.stderr
    if _is_quiet or not terminal.isatty():
        return
    # The terminal may have been closed.
    with suppress(OSError):
        if text:
            one_line = " · ".join(f"{_prefix}{text}".splitlines())
            width = os.get_terminal_size(terminal.fileno()).columns
            text = visible(one_line)[: width - 1]
        terminal.write(f"{_CLEAR}{text}")
        terminal.flush()


@contextmanager
def progress(description: str, total: int) -> Iterator[Callable[..., None]]:
    """Show the progress over `total` steps, with the time left.

    Yields a function to be called at the end of each step. Its first argument replaces the description, unless it is
    None; its second one is the number of steps that ended, if there are several. Nothing is drawn during a step,
    because drawing would take time from the measurement. Without a terminal, a line is printed at most once a minute.
    """
    num_done = num_first = 0
    # The first call includes the warm-up, so the time per step is estimated from the later calls.
    began = time.monotonic()

    def advance(text: str | None, num_steps: int = 1) -> None:
        nonlocal num_done, num_first, began, description
        num_done += num_steps
        description = text or description
        if not num_first:
            num_first = num_done
            began = time.monotonic()
        seconds = (time.monotonic() - began) / max(1, num_done - num_first)
        left = seconds * (total - num_done)
        _draw(description, num_done, total, left if num_first < num_done < total else None)

    _draw(description, 0, total, None)
    try:
        yield advance
    finally:
        show("")


def _draw(description: str, num_done: int, total: int, left: float | None) -> None:
    """Show the bar; `left` is the number of seconds left, or None if not known."""
    length = round(_BAR * num_done / max(1, total))
    time_left = "" if left is None else f" · about {duration_in_words(left)} left"
    bar = "━" * length + "─" * (_BAR - length)
    show(f"{bar} {num_done}/{total} · {description}{time_left}")
    is_silent = time.monotonic() - _last_printed >= _SILENT_S
    if is_silent and not (_sweep_terminal or sys.stderr).isatty():
        _print(f"{description}: {num_done} of {total}{time_left}")


def duration_in_words(seconds: float) -> str:
    """A duration in words: `40 s`, `12 minutes`, `3.5 hours`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} minutes"
    return f"{seconds / 3600:.1f} hours"
