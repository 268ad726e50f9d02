"""The module `reporting.drawing`, for callers that do without plots where matplotlib is not installed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

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


def drawn_files(make: Callable[[], Mapping[str, Sequence[Any]]]) -> dict[str, bytes]:
    """The SVG of plots by file name; {} without matplotlib.

    Args:
        make: the plots of a run, as `Page.plots`.
    """
    drawing = optional_plots()
    files: dict[str, bytes] = {} if drawing is None else drawing.picture_files(make)
    return files
