"""The real command on a free port, and its address."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from forked import Forked, command
from processes import wait_for

ROOT = Path(__file__).parents[2]


@contextmanager
def serving(
    directory: Path, *settings: str, grace_s: float | None = None, **environment: str
) -> Iterator[tuple[str, Forked]]:
    """`python -m harness serve` in a directory, with its address.

    It must end well on Ctrl-C, if it has not ended by then, and never print a traceback.

    Args:
        grace_s: another grace period after a signal.
    """

    def program() -> None:
        if grace_s is not None:
            from harness.serve import command as serve

            serve._GRACE_S = grace_s
        command(["serve", "port=0", *settings])

    with (directory / "stdout").open("w+") as stdout, (directory / "stderr").open("w+") as stderr:
        process = Forked(
            program,
            environment=os.environ | environment,
            directory=directory,
            output=[stdout, stderr],
        )
        try:
            wait_for(process, directory, "stdout", holding="\n")
            line = (directory / "stdout").read_text()
            assert line.startswith("Serving "), line
            yield line.split(" on ")[1].split()[0].rstrip("/"), process
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0
            printed = (directory / "stderr").read_text()
            assert "Traceback" not in printed, printed
        finally:
            process.kill()
            process.wait()


@contextmanager
def served(directory: Path, *settings: str, **environment: str) -> Iterator[str]:
    """The address of `serving`."""
    with serving(directory, *settings, **environment) as (url, _):
        yield url
