"""The command of a run as others can type it: without the port that the harness adds."""

from __future__ import annotations

import json
import shlex

from harness.engines.registry import ENGINES
from harness.measuring.rows import LatencyRow
from harness.results.runs import Run


def typed_command(run: Run[LatencyRow]) -> str | None:
    """The command as it was typed, from the run's `environment.json`; None where that is gone."""
    if run.directory is None:
        return None
    try:
        text = (run.directory / "environment.json").read_text(encoding="utf-8")
        command = json.loads(text).get("command_line")
        words = command if isinstance(command, list) else shlex.split(command)
    except (OSError, ValueError, AttributeError, TypeError):
        return None
    return shlex.join(map(str, words))


def server_commands(row: LatencyRow) -> list[str]:
    """The commands that started the servers of a run, the one that was measured last; [] of a run that started none."""
    engine = ENGINES.loaded(row.engine or "")
    commands = []
    for command in (row.server_command or "").split("; "):
        try:
            words = shlex.split(command)
        except ValueError:
            # Cut within quotes: the command itself has a semicolon.
            return []
        if words:
            typed = words if engine is None else engine.typed_command(words)
            commands.append(shlex.join(typed))
    return commands
