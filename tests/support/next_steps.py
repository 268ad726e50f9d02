"""The commands that answers name as the next ones, and whether they would run: each must compose to settings."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from composing import composed_line, composing
from harness.commands.registry import with_settings
from harness.reporting.page import NextStep


@contextmanager
def collected() -> Iterator[list[NextStep]]:
    """Every step of the answers that are made within the block, each with its command in full."""
    steps: list[NextStep] = []
    original = NextStep.typed

    def typed(self: NextStep) -> str:
        command = original.fget(self)
        steps.append(NextStep(self.text, command=command))
        return command

    NextStep.typed = property(typed)
    try:
        yield steps
    finally:
        NextStep.typed = original


@functools.cache
def _accepted(line: str) -> None:
    program, command, *words = shlex.split(line)
    assert (program, command in with_settings()) == ("harness", True), line
    with composing():
        composed_line(command, words)


def all_accepted(steps: Iterable[NextStep]) -> None:
    """Each has a command that composes to settings.

    Raises:
        SettingError: they break a rule.
    """
    for step in steps:
        _accepted(step.command)
