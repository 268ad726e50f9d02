"""The entry point of `python -m harness` and `harness`: from its first moment, Ctrl-C ends it with a single line.

That includes the time of the imports, which would otherwise end with a traceback.
"""

from __future__ import annotations

import os
import signal
from types import FrameType


def main() -> None:
    """Run a command through `cli.main`, which then handles Ctrl-C itself."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
    from harness.cli.main import main as run_command

    run_command()


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, b"harness: interrupted\n")
    os._exit(130)


if __name__ == "__main__":
    main()
