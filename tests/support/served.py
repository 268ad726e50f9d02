"""The real command on a free port, and its address."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]


@contextmanager
def served(directory: Path, *settings: str, **environment: str) -> Iterator[str]:
    """`python -m harness serve` in a directory; it must end well on Ctrl-C, and never print a traceback."""
    with (directory / "stderr").open("w+") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "harness", "serve", "port=0", *settings],
            cwd=directory, env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
            stdout=subprocess.PIPE, stderr=stderr, text=True,
        )  # fmt: skip
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            stderr.seek(0)
            assert line.startswith("Serving "), stderr.read()
            yield line.split(" on ")[1].split()[0].rstrip("/")
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0
            stderr.seek(0)
            assert "Traceback" not in stderr.read()
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
