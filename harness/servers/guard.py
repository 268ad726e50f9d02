"""Runs a server and ends it with all of its processes, however the harness ends. It is a program:

    python guard.py LOG COMMAND...

Its standard input is a pipe from the harness, whose one line has the keys that must not stay in the log. When the pipe
closes, because the harness closed it or has ended in any way, the server gets SIGTERM. A while later, whatever is left
of the server and of all processes that it started gets SIGKILL. The guard exits when none of them is left, with the
server's exit code.

A container is not a child of its client `docker run`, so it is ended by its id, which is in the file of `--cidfile`.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
from contextlib import suppress

import psutil

# Seconds between two looks, and the seconds that processes have to end by themselves.
_LOOK_S = 0.1
_GRACE_S = 5.0
# How many bytes are masked at each end of a long log, and how many at a time.
_MOST_MASKED = 1 << 28
_PART = 1 << 24
# From linux/prctl.h.
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def main(log: str, command: list[str]) -> int:
    """Run the command until it ends or the harness does, and return its exit code: 128 + the signal if one ended it."""
    harness = os.getppid()
    # The guard ends the server once the pipe closes. A closed terminal or Ctrl-C must not end the guard before that.
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # Processes that the server leaves behind become children of this process, and so can be found.
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    keys = json.loads(sys.stdin.readline() or "[]")
    with open(log, "ab") as output:
        server = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=_prepare_server,
        )
    while server.poll() is None:
        closed, _, _ = select.select([sys.stdin], [], [], _LOOK_S)
        # If the harness forked, another process may hold the pipe open; so its parent is checked, too.
        if closed or os.getppid() != harness:
            break
    grace_s = 0.0
    if server.poll() is None:
        server.terminate()
        grace_s = _GRACE_S
    if "--cidfile" in command:
        with suppress(subprocess.TimeoutExpired):
            server.wait(grace_s)
        _end_container(command)
    while left := psutil.Process().children(recursive=True):
        _, alive = psutil.wait_procs(left, timeout=grace_s)
        for process in alive:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        grace_s = _LOOK_S
    _mask(log, keys)
    code = server.wait()
    return code if code >= 0 else 128 - code


def _mask(log: str, keys: list[str]) -> None:
    """Write stars over the keys in a log. In a very long log only its beginning and its end are masked.

    Each part overlaps the one before by the length of a key, which may have begun there.
    """
    with suppress(OSError), open(log, "r+b") as file:
        size = os.fstat(file.fileno()).st_size
        longest = max(map(len, map(str.encode, keys)), default=0)
        for begin in {0, max(0, size - _MOST_MASKED)}:
            for offset in range(begin, min(size, begin + _MOST_MASKED), _PART - longest):
                file.seek(offset)
                content = masked = file.read(_PART)
                for key in map(str.encode, keys):
                    masked = masked.replace(key, b"*" * len(key))
                if masked != content:
                    file.seek(offset)
                    file.write(masked)


def _end_container(command: list[str]) -> None:
    """End the container that `docker run` started, if it still runs."""
    index = command.index("--cidfile")
    client = command[: command.index("run")]
    with suppress(OSError, subprocess.TimeoutExpired):
        with open(command[index + 1], encoding="utf-8") as file:
            number = file.read().strip()
        if number:
            subprocess.run([*client, "kill", number], capture_output=True, timeout=_GRACE_S)


def _prepare_server() -> None:
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    # The server ends even if somebody kills the guard.
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
