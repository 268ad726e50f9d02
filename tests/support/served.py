"""The real command on a free port, and its address."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def serving(
    directory: Path, *settings: str, program: str | None = None, **environment: str
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """`python -m harness serve` in a directory, with its address.

    It must end well on Ctrl-C, if it has not ended by then, and never print a traceback. It is a
    new interpreter: a fork of the tests' process has its locks but not its threads, and a server
    with threads of its own may wait for them forever. `program` may replace the command.
    """
    start = ["-m", "harness"] if program is None else ["-c", program]
    with (directory / "stderr").open("w+") as stderr:
        process = subprocess.Popen(
            [sys.executable, *start, "serve", "port=0", *settings],
            cwd=directory, env=os.environ | environment,
            stdout=subprocess.PIPE, stderr=stderr, text=True,
        )  # fmt: skip
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            stderr.seek(0)
            assert line.startswith("Serving "), stderr.read()
            yield line.split(" on ")[1].split()[0].rstrip("/"), process
            process.send_signal(signal.SIGINT)
            assert process.wait() == 0
            stderr.seek(0)
            printed = stderr.read()
            assert "Traceback" not in printed, printed
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


@contextmanager
def served(directory: Path, *settings: str, **environment: str) -> Iterator[str]:
    """The address of `serving`."""
    with serving(directory, *settings, **environment) as (url, _):
        yield url
