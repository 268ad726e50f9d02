"""Commands run in the process of the tests, which has torch loaded already."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest

from harness import cli


class Outcome(NamedTuple):
    exit_code: int
    stdout: str
    stderr: str

    @property
    def complaint(self) -> str:
        """The error line, without what was said before it."""
        return next(line for line in self.stderr.splitlines() if line.startswith("harness: "))


Harness = Callable[..., Outcome]


def in_process(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Harness:
    """A function that runs a command as `python -m harness` does."""

    def run(*arguments: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["harness", *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            cli.main()
        printed = capsys.readouterr()
        return Outcome(int(end.value.code or 0), printed.out, printed.err)

    return run
