"""The real command on a free port, and its address."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2 as httpx

from forked import Forked, begin

# Without certificates: to read them takes longer than an answer. Each request has a connection of its own.
CLIENT = httpx.Client(timeout=None, verify=False, limits=httpx.Limits(max_keepalive_connections=0))


@contextmanager
def serving(
    directory: Path, *settings: str, before: Callable[[], object] | None = None, **environment: str
) -> Iterator[tuple[str, Forked]]:
    """`python -m harness serve` in a directory, with its address; see `begin`.

    It must end well on Ctrl-C, if it has not ended by then, and never print a traceback.
    """
    process = begin("serve", "port=0", *settings, cwd=directory, before=before, **environment)
    stdout, _ = process.printed
    try:
        while not (line := os.pread(stdout.fileno(), 1000, 0).decode()):
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)
        assert line.startswith("Serving "), line
        yield line.split(" on ")[1].split()[0].rstrip("/"), process
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate()
        assert process.returncode == 0, stderr
        assert "Traceback" not in stderr, stderr
    finally:
        process.kill()
        process.wait()


@contextmanager
def served(directory: Path, *settings: str, **environment: str) -> Iterator[str]:
    """The address of `serving`."""
    with serving(directory, *settings, **environment) as (url, _):
        yield url
