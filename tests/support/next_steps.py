"""The commands that answers name as the next ones, and whether they would run: each must compose to settings."""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from composing import composed_line, composing
from harness.commands.registry import with_settings
from harness.reporting.page import NextStep


@contextmanager
def collected() -> Iterator[list[NextStep]]:
    """Every step of the answers that are made within the block, with its command, room or not."""
    steps: list[NextStep] = []
    original = NextStep.typed

    def typed(self: NextStep, is_sweep: bool) -> str:
        command = original(self, is_sweep)
        steps.append(NextStep(self.text, command=command))
        return command

    NextStep.typed = typed  # type: ignore[method-assign]
    try:
        yield steps
    finally:
        NextStep.typed = original  # type: ignore[method-assign]


def accepted(step: NextStep) -> Any:
    """The settings to which the command of a step composes, of a sweep those of its last job; None for commands
    that have none.

    Raises:
        SettingError: they break a rule.
    """
    return _accepted(step.command.removeprefix("OMP_NUM_THREADS=1 "))


@functools.cache
def _accepted(line: str) -> Any:
    program, command, *words = shlex.split(line)
    assert program == "harness", line
    if command not in with_settings():
        assert command in ("report", "regress"), line
        return None
    with composing():
        return composed_line(command, words)


def all_accepted(steps: Iterable[NextStep]) -> None:
    """Each has a command that composes, but for those that stand for a reader's own."""
    for step in steps:
        if not re.search("^the same with|FILE|YOUR_", step.command):
            accepted(step)
