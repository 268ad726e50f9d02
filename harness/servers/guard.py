"""Runs a server, and ends it with all of its processes, however harness ends. It is a program:

    python guard.py LOG COMMAND...

Its standard input is a pipe from harness. The pipe's only line is a JSON list of the keys that must be removed from the
log. The pipe closes when harness closes it or ends in any way; the server then gets SIGTERM. After `_GRACE_S` seconds,
all remaining processes of the server get SIGKILL. If the server ends by itself, its remaining processes get SIGKILL
immediately.

The guard exits when none of these processes is left. If the server ended by itself, the guard exits with the server's
exit code. After the pipe has closed, the guard's exit code says nothing about the server.

A container is not a child process of its client `docker run`. It is ended by its id, which is in the file that
`--cidfile` names. With a container, ending may take up to three times `_GRACE_S`: for SIGTERM to the client, for
`docker kill`, and for the processes that are left.
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

# Seconds between two checks of the pipe, and the seconds that processes have to end by themselves after SIGTERM.
_LOOK_S = 0.1
_GRACE_S = 5.0
# How many bytes at the beginning and at the end of a long log are searched for keys, and how many bytes at a time.
_MOST_MASKED = 1 << 28
_PART = 1 << 24
# From linux/prctl.h.
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def main(log: str, command: list[str]) -> int:
    """Run the command until it or harness ends, and return its exit code; if a signal ended it, 128 plus the signal's
    number. If harness ended or closed the pipe first, the returned number says nothing about the command.
    """
    harness = os.getppid()
    # The guard must survive a closed terminal and Ctrl-C, because it ends the server when the pipe closes.
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # Processes that outlive the server become children of this process, so that they can be found.
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
        # If harness has forked, another process may keep the pipe open. So the guard's parent process is checked, too.
        if closed or os.getppid() != harness:
            break
    # How many seconds processes may take to end before they are killed: 0 if the server has ended by itself.
    grace_s = 0.0
    if server.poll() is None:
        server.terminate()
        grace_s = _GRACE_S
    if "--cidfile" in command:
        with suppress(subprocess.TimeoutExpired):
            server.wait(grace_s)
        _end_container(command)
    # If the server is still in the list, `wait_procs` takes its exit code, and `server.wait()` returns 0. Nobody needs
    # the code of a server that was ended here.
    while left := psutil.Process().children(recursive=True):
        _, alive = psutil.wait_procs(left, timeout=grace_s)
        for process in alive:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        # Killed processes need a moment to end, and others may have been started meanwhile.
        grace_s = _LOOK_S
    _mask(log, keys)
    code = server.wait()
    return code if code >= 0 else 128 - code


def _mask(log: str, keys: list[str]) -> None:
    """Write stars over the keys in a log. In a very long log, only the beginning and the end are searched.

    The log is read in parts. Each part overlaps the previous part by the length of the longest key, so that keys across
    a boundary are found.
    """
    with suppress(OSError), open(log, "r+b") as file:
        size = os.fstat(file.fileno()).st_size
        codes = [key.encode() for key in keys]
        longest = max(map(len, codes), default=0)
        for begin in {0, max(0, size - _MOST_MASKED)}:
            for offset in range(begin, min(size, begin + _MOST_MASKED), _PART - longest):
                file.seek(offset)
                content = masked = file.read(_PART)
                for code in codes:
                    masked = masked.replace(code, b"*" * len(code))
                if masked != content:
                    file.seek(offset)
                    file.write(masked)


def _end_container(command: list[str]) -> None:
    """End the container that `docker run` started, if it still runs."""
    index = command.index("--cidfile")
    # The words before `run`, which `--cidfile` follows: the program (`docker` or `podman`), and its own options.
    client = command[: index - 1]
    with suppress(OSError, subprocess.TimeoutExpired):
        with open(command[index + 1], encoding="utf-8") as file:
            number = file.read().strip()
        if number:
            subprocess.run([*client, "kill", number], capture_output=True, timeout=_GRACE_S)


def _prepare_server() -> None:
    """Called in the server's process before the command starts. Ignored signals would otherwise stay ignored."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    # The kernel kills the server if the guard is killed.
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    """Set an option of this process in the Linux kernel. Other systems have no such options."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
