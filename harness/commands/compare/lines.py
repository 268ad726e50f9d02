"""Reads the prompts of `compare` from a terminal or a pipe."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path


def piped_lines() -> Iterator[str]:
    """Standard input, one prompt per line; invalid UTF-8 becomes replacement characters."""
    for number, line in enumerate(sys.stdin.buffer):
        yield line.decode("utf-8-sig" if number == 0 else "utf-8", errors="replace").rstrip("\r\n")


def typed_lines(history_file: Path, examples: Sequence[str]) -> Iterator[str]:
    """Lines typed on the terminal, with line editing, history and pastes of several lines.

    Ctrl-D, or Ctrl-C on an empty line, ends; Ctrl-C on a line with text discards the text.

    Args:
        history_file: keeps typed lines for the next session.
        examples: prompts that are the oldest of the history.
    """
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory
    from prompt_toolkit.output import create_output

    class History(FileHistory):
        def load_history_strings(self) -> Iterator[str]:  # the newest first
            yield from super().load_history_strings()
            yield from examples

    # The prompt goes to stderr where stdout is a file.
    session: PromptSession[str] = PromptSession(
        history=History(str(history_file)),
        output=create_output(always_prefer_tty=True),
        prompt_continuation="… ",
    )
    while True:
        try:
            line = session.prompt("> ")
        except EOFError:
            return
        except KeyboardInterrupt as interrupt:
            if interrupt.args:  # a signal to end, see `cli.signals`
                raise
            if not session.default_buffer.text:
                return
            continue
        # A terminal in another encoding may deliver lone surrogates, which become `?`.
        yield line.encode(errors="replace").decode()
