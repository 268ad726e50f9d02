"""The command of a run as others can type it: without the port that the harness adds."""

from __future__ import annotations

import shlex

from harness.measuring.rows import LatencyRow
from harness.servers.dialects import without_port


def server_commands(row: LatencyRow) -> list[str]:
    """The commands that started the servers of a run, the one that was measured last; [] of a run that started none."""
    commands = []
    for command in (row.server_command or "").split("; "):
        try:
            words = shlex.split(command)
        except ValueError:
            # Cut within quotes: the command itself has a semicolon.
            return []
        if words:
            commands.append(shlex.join(without_port(words)))
    return commands
