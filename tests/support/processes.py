"""Commands as processes of their own, each in a new interpreter; see also `forked`."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HARNESS = [sys.executable, "-m", "harness"]


def run(
    *arguments: str,
    cwd: Path,
    code: int | None = 0,
    command: list[str] = HARNESS,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Run a command, which must end with the exit code that is expected."""
    done = subprocess.run(
        [*command, *arguments],
        cwd=cwd, env=os.environ | environment, capture_output=True, text=True,
    )  # fmt: skip
    assert code in (None, done.returncode), done.stderr
    return done


def start(
    *arguments: str, cwd: Path, until: str, command: list[str] = HARNESS, **environment: str
) -> subprocess.Popen[str]:
    """Start a command, and wait until it has written a file whose path matches."""
    process = subprocess.Popen(
        [*command, *arguments],
        cwd=cwd, env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    wait_for(process, cwd, until)
    return process


def wait_for(process: Any, directory: Path, until: str, holding: str = "") -> None:
    """Wait until the process has written a file whose path matches, and this text into it."""
    while not any(_holds(file, holding) for file in directory.glob(until)):
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


def end(process: Any, number: int, code: int) -> tuple[str, str]:
    """Send a signal, after which the process must end with this exit code; what it has printed to stdout and stderr."""
    process.send_signal(number)
    printed = process.communicate()
    assert process.returncode == code, printed
    return printed


def _holds(file: Path, text: str) -> bool:
    return not text or text in file.read_text()
