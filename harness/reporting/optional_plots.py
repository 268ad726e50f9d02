"""The module `reporting.drawing`, for callers that do without plots where matplotlib is not installed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from harness.results.runs import Run
from harness.results.schema import RunRow

INSTALL_PLOTS = "pip install 'specharness[report]'"


def optional_plots() -> ModuleType | None:
    """The module `harness.reporting.drawing`; None without matplotlib, with a line on stderr."""
    try:
        from harness.reporting import drawing
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        print(f"no plots without matplotlib: {INSTALL_PLOTS} brings it", file=sys.stderr)
        return None
    return drawing


def drawn_files(
    plots: Callable[[Sequence[Run]], Mapping[str, Sequence[Any]]], rows: Sequence[RunRow]
) -> dict[str, str]:
    """The SVG text of the plots of one run, by file name; {} without matplotlib.

    Args:
        plots: of a command, see `Command.plots`.
        rows: all rows of the run.
    """
    drawing = optional_plots()
    if drawing is None:
        return {}
    run = Run(list(rows))
    files: dict[str, str] = drawing.picture_files(lambda: plots([run]))
    return files
