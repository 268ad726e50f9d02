"""`python -m harness`, which `harness` starts too: Ctrl-C ends it in one line from its first moment on, while it still
imports.
"""

from __future__ import annotations

import os
import signal
from types import FrameType


def main() -> None:
    """Run a command, see `cli.main`, which takes Ctrl-C over."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
    from harness.cli.main import main as run_command

    run_command()


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, b"harness: interrupted\n")
    os._exit(130)


if __name__ == "__main__":
    main()
