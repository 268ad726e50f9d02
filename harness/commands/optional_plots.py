"""The module `drawing`, for callers that do without it where matplotlib is not installed."""

from __future__ import annotations

import sys
from types import ModuleType

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
