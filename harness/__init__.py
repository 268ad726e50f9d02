"""harness measures whether speculative decoding pays for a pair of language models.

From Python: `harness.run("latency", "model=7B", "draft=none")`. Until that call, nothing slow is imported.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from harness.config.errors import HarnessError, RunError, SettingError, VerdictError

if TYPE_CHECKING:
    from harness.cli.main import run

__version__ = "0.3.0"
__all__ = ["HarnessError", "RunError", "SettingError", "VerdictError", "run"]


def __getattr__(name: str) -> Any:
    """Import `run` on its first use, so that importing the package is quick and Ctrl-C is soon handled."""
    if name != "run":
        raise AttributeError(f"module harness has no attribute {name}")
    return import_module("harness.cli.main").run
