"""The module `reporting.drawing`, for callers that do without plots where matplotlib is not installed."""

from __future__ import annotations

import sys
from types import ModuleType

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
