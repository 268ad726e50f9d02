"""harness measures whether speculative decoding pays for a pair of language models.

From Python: `harness.run("latency", "model=7B", "draft=none")`. Nothing heavy is imported before that.
"""

from harness.cli.frames import pairs
from harness.cli.main import run
from harness.config.errors import HarnessError, RunError, SettingError, VerdictError

__version__ = "0.3.0"
__all__ = ["HarnessError", "RunError", "SettingError", "VerdictError", "pairs", "run"]
