"""The commands that answers name as the next ones, and whether they would run: each must compose to settings."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from composing import composed_line, composing
from harness.commands.registry import with_settings
from harness.reporting.page import NextStep

_READERS_OWN = {
    "YOUR_SERVER_COMMAND": "python -m vllm.entrypoints.openai.api_server --model M --spec-method mtp --spec-tokens {K}",
    "prompts=FILE": "prompts=./file.jsonl",
    "HOST:PORT": "127.0.0.1:8000",
}


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


def accepted(step: NextStep) -> Any:
    """The settings to which the command of a step composes, of a sweep those of its last job; None for commands
    that have none.

    Raises:
        SettingError: they break a rule.
    """
    return _accepted(step.command)


@functools.cache
def _accepted(line: str) -> Any:
    program, command, *words = shlex.split(line)
    assert program == "harness", line
    if command not in with_settings():
        assert command == "report", line
        return None
    with composing():
        return composed_line(command, words)


def all_accepted(steps: Iterable[NextStep]) -> None:
    """Each has a command that composes; what stands for a reader's own is replaced by something."""
    for step in steps:
        command = step.command
        for placeholder, own in _READERS_OWN.items():
            command = command.replace(placeholder, own)
        for line in command.splitlines():
            # A run whose directory is gone has no command.
            if "type its command" not in line:
                accepted(NextStep("", command=line))
