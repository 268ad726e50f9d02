"""The module `drawing`, for callers that do without it where matplotlib is not installed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType

from harness.commands.read_runs import Run
from harness.records.command import Command
from harness.results.schema import RunRow

INSTALL_PLOTS = "pip install 'specharness[report]'"


def optional_plots() -> ModuleType | None:
    """The module `drawing`; None without matplotlib, which a line on stderr says."""
    try:
        from harness.tables import drawing
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        print(f"no plots without matplotlib: {INSTALL_PLOTS} brings it", file=sys.stderr)
        return None
    return drawing


def drawn_files(command: Command, rows: Sequence[RunRow]) -> dict[str, str]:
    """A run's own pictures, by the names of their files; none without matplotlib."""
    plots = optional_plots()
    return {} if plots is None else plots.picture_files(lambda: command.plots([Run(list(rows))]))
