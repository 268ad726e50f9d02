"""Runs a command that is stopped for the share `SLOW` of the time, as on a device that is slower by so much.

    SLOW=0.05 python benchmarks/slowed.py llama-server --port 8080 ...

A few milliseconds at a time (SIGSTOP, SIGCONT), so that every request of some tenths of a second meets
its share. How long each stop really took decides when the next one is due.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

STOP_S = 0.004
LOOK_S = 0.001


def main() -> None:
    share = float(os.environ.get("SLOW", "0"))
    process = subprocess.Popen(sys.argv[1:])
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    if not share:
        sys.exit(process.wait())
    started = time.monotonic()
    stopped_s = 0.0
    while process.poll() is None:
        time.sleep(LOOK_S)
        if stopped_s > share * (time.monotonic() - started):
            continue
        process.send_signal(signal.SIGSTOP)
        stopped = time.monotonic()
        time.sleep(STOP_S)
        process.send_signal(signal.SIGCONT)
        stopped_s += time.monotonic() - stopped
    sys.exit(process.returncode)


if __name__ == "__main__":
    main()
