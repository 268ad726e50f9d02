"""A command in a real pseudo-terminal, and a terminal emulator that shows what a user would see."""

import codecs
import os
import select
import termios
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pyte

from forked import Forked, command

LINES = 24
UP, CTRL_C, CTRL_D, ENTER = "\x1b[A", "\x03", "\x04", "\r"
# How long a test waits for output. Far above what it takes: a test fails by this only when no output comes at all.
PATIENCE_S = 300


class Terminal:
    """A harness command, forked, in a terminal of a given size. What scrolls off the top is kept."""

    def __init__(
        self,
        *arguments: str,
        directory: Path,
        columns: int = 80,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._screen = pyte.HistoryScreen(columns, LINES, history=10_000)
        self._stream = pyte.Stream(self._screen)
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        own = ("NO_COLOR", "COLUMNS", "LINES", "FORCE_COLOR")
        inherited = {name: value for name, value in os.environ.items() if name not in own}
        inherited |= {"TERM": "xterm-256color", "COLORTERM": "truecolor"}
        inherited |= environment or {}
        self._keyboard, inside = os.openpty()
        termios.tcsetwinsize(inside, (LINES, columns))
        program = partial(command, arguments)
        self._process = Forked(program, environment=inherited, directory=directory, terminal=inside)
        os.close(inside)
        # A terminal replies to a request for the cursor's position.
        self._screen.write_process_input = self.type

    @property
    def text(self) -> str:
        """Everything that is or was on the screen."""
        shown = [self._screen.buffer[row] for row in range(self._screen.lines)]
        rows = [*self._screen.history.top, *shown]
        columns = range(self._screen.columns)
        lines = ("".join(row[column].data for column in columns).rstrip() for row in rows)
        return "\n".join(lines).rstrip()

    @property
    def prose(self) -> str:
        """The same on one line, however the screen wraps it."""
        return " ".join(self.text.split())

    def colours(self, word: str) -> set[str]:
        """The colours of the latest `word`, as hexadecimal numbers or names."""
        for row in reversed([*self._screen.history.top, *self._screen.buffer.values()]):
            line = "".join(row[column].data or "\0" for column in range(self._screen.columns))
            if word in line:
                start = line.rindex(word)
                return {row[column].fg for column in range(start, start + len(word))}
        raise AssertionError(f"{word!r} is not on the screen:\n{self.text}")

    def type(self, keys: str) -> None:
        os.write(self._keyboard, keys.encode())

    def wait_for(self, expected: str, times: int = 1) -> None:
        """Wait until `expected` is in the prose on the screen, this many times."""
        deadline = time.monotonic() + PATIENCE_S
        while self.prose.count(expected) < times:
            assert time.monotonic() < deadline, f"no {expected!r} in:\n{self.text}"
            assert self._read(), f"ended without {expected!r}:\n{self.text}"

    def wait_for_end(self) -> int:
        """Wait until the command ends; its exit code."""
        deadline = time.monotonic() + PATIENCE_S
        while self._read():
            assert time.monotonic() < deadline, f"still running:\n{self.text}"
        return self._process.wait(PATIENCE_S)

    def close_window(self) -> int:
        """End the terminal itself, for which the kernel sends SIGHUP; the command's exit code."""
        self._close()
        return self._process.wait(PATIENCE_S)

    def kill(self) -> None:
        """End the command, whatever it does, and the terminal."""
        self._process.kill()
        self._process.wait()
        self._close()

    def _close(self) -> None:
        if self._keyboard >= 0:
            os.close(self._keyboard)
        self._keyboard = -1

    def _read(self) -> bool:
        """Feed the screen for a moment; False at the end."""
        readable, _, _ = select.select([self._keyboard], [], [], 0.1)
        if not readable:
            return True
        try:
            printed = os.read(self._keyboard, 65536)
        except OSError:  # on Linux, when no process has the terminal any more
            return False
        self._stream.feed(self._decoder.decode(printed))
        return bool(printed)
