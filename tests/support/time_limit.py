"""The end of a test that takes too long: all stacks are printed, also those of the processes that it started.

They end, and so does the process of the test; pytest-xdist then starts another one for the tests that are left.
"""

# Imported by every interpreter that a test starts: nothing that takes time to import is imported here.
from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    import psutil

# The variable with the directory where each process has a file for its stacks, named by its number.
STACKS = "HARNESS_TESTS_STACKS"
_SIGNAL = signal.SIGUSR1


def print_stacks_when_asked() -> None:
    """Let this process write the stacks of its threads when it gets the signal, whatever it does then."""
    if STACKS in os.environ:
        path = f"{os.environ[STACKS]}/{os.getpid()}"
        faulthandler.register(_SIGNAL, os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))


def end(item: Any, settings: Any) -> None:
    """Print what a test has printed and the stacks of its processes, and end them."""
    import psutil
    import pytest_timeout

    if pytest_timeout.is_debugging():
        return
    children = psutil.Process().children(recursive=True)
    capture = item.config.pluginmanager.getplugin("capturemanager")
    capture.suspend_global_capture(item)
    terminal = item.config.get_terminal_writer()
    if hasattr(item.config, "workerinput"):
        # The terminal of a process of pytest-xdist is not shown.
        terminal._file = sys.__stderr__
    terminal.line(f"\n{item.nodeid} takes more than {settings.timeout:g} s.")
    terminal.line("".join(capture.read_global_capture()))
    terminal.line(stacks_of(children))
    pytest_timeout.dump_stacks(terminal)
    terminal.flush()
    # Not before: the test would go on without them.
    for child in children:
        if child.is_running():
            child.kill()
    os._exit(1)


def stacks_of(processes: Iterable[psutil.Process]) -> str:
    """The stacks of all threads of those processes that are interpreters started by a test."""
    texts = []
    for process in processes:
        path = f"{os.environ[STACKS]}/{process.pid}"
        if process.is_running() and os.path.exists(path):
            command = " ".join(process.cmdline())
            process.send_signal(_SIGNAL)
            # Much more than it takes.
            time.sleep(1)
            with open(path) as file:
                texts.append(f"Stacks of process {process.pid}, {command}:\n{file.read()}")
    return "\n".join(texts)
