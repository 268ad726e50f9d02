"""The command line as lists of words: what was typed for the harness, and the command of each server behind a `--`."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass

_VARIABLE = "HARNESS_COMMAND_LINE"


@dataclass(frozen=True)
class Words:
    """The words typed after `harness`, divided at each `--`.

    Attributes:
        typed: the command and its settings.
        servers: the command of each server, each behind a `--`.
    """

    typed: Sequence[str] = ()
    servers: Sequence[Sequence[str]] = ()

    @classmethod
    def divide(cls, arguments: Sequence[str]) -> Words:
        """Divide arguments at each `--`."""
        parts: list[list[str]] = [[]]
        for word in arguments:
            if word == "--":
                parts.append([])
            else:
                parts[-1].append(word)
        typed, *servers = parts
        return cls(typed, servers)

    @property
    def arguments(self) -> list[str]:
        """The arguments of a process, as `divide` takes them."""
        behind = [word for server in self.servers for word in ("--", *server)]
        return [*self.typed, *behind]

    def __str__(self) -> str:
        """The line that starts this command again, in a shell."""
        return shlex.join(["harness", *self.arguments])

    def note(self) -> None:
        """Keep them for this process and those that it starts, whose own arguments differ."""
        os.environ[_VARIABLE] = json.dumps(self.arguments)

    @classmethod
    def noted(cls) -> Words:
        """The words that `note` kept; without them, those of this process."""
        kept = os.environ.get(_VARIABLE)
        return cls.divide(json.loads(kept) if kept else sys.argv[1:])
