"""A command in a real pseudo-terminal, and a terminal emulator that shows what a user would see."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pexpect
import pyte

UP, CTRL_C, CTRL_D, ENTER = "\x1b[A", "\x03", "\x04", "\r"
# How long a test waits for output. Far above what it takes: a test fails by this only when no output comes at all.
PATIENCE_S = 300


class Terminal:
    """A harness command in a terminal of a given size. What scrolls off the top is kept."""

    def __init__(
        self,
        *arguments: str,
        directory: Path,
        columns: int = 80,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._screen = pyte.HistoryScreen(columns, 24, history=10_000)
        self._stream = pyte.Stream(self._screen)
        inherited = {
            k: v
            for k, v in os.environ.items()
            if k not in ("NO_COLOR", "COLUMNS", "LINES", "FORCE_COLOR")
        }
        self._child = pexpect.spawn(
            sys.executable,
            ["-m", "harness", *arguments],
            cwd=directory,
            dimensions=(24, columns),
            env=inherited
            | {"TERM": "xterm-256color", "COLORTERM": "truecolor"}
            | dict(environment or {}),
            encoding="utf-8",
        )
        # A terminal replies to a request for the cursor's position.
        self._screen.write_process_input = self._child.send

    @property
    def text(self) -> str:
        """Everything that is or was on the screen."""
        rows = [
            *self._screen.history.top,
            *(self._screen.buffer[row] for row in range(self._screen.lines)),
        ]
        lines = (
            "".join(row[column].data for column in range(self._screen.columns)).rstrip()
            for row in rows
        )
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
        self._child.send(keys)

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
        self._child.close()
        assert isinstance(self._child.exitstatus, int), (
            f"killed by signal {self._child.signalstatus}"
        )
        return self._child.exitstatus

    def signal(self, number: int) -> None:
        """Send a signal: SIGTERM, as a scheduler does, or SIGHUP."""
        self._child.kill(number)

    def close_window(self) -> int:
        """End the terminal itself, for which the kernel sends SIGHUP; the command's exit code."""
        nowhere = os.open(os.devnull, os.O_RDWR)
        os.dup2(nowhere, self._child.child_fd)
        os.close(nowhere)
        return int(self._child.wait())

    def kill(self) -> None:
        self._child.close(force=True)

    def _read(self) -> bool:
        """Feed the screen for a moment; False at the end."""
        try:
            self._stream.feed(self._child.read_nonblocking(65536, timeout=0.1))
        except pexpect.TIMEOUT:
            pass
        except pexpect.EOF:
            return False
        return True
