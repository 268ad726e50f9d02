"""The kinds of row that this project writes."""

from __future__ import annotations

from harness.records.registry import COMMANDS
from harness.results.row import Row


def row_kinds() -> list[type[Row]]:
    """Every kind; a command from elsewhere brings its own."""
    kinds: list[type[Row]] = []
    built_in = COMMANDS.built_in().values()
    for command in sorted(built_in, key=lambda command: command.help_order):
        if command.row is not None:
            kinds.append(command.row)
        kinds += command.further_rows
    return kinds
