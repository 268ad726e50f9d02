"""Processes forked from a server that has imported torch and transformers already (`fork_server`).

To import both takes a new interpreter several seconds, more than most runs of the tiny pair. What
a new interpreter does differently, such as a signal during the imports, is tested with one
(`processes.run`, `processes.start`).
"""

from __future__ import annotations

import itertools
import os
import pkgutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

import filelock
import pytest

from processes import wait_for

# Where the server is asked for a process: one for all processes of pytest-xdist, which lives as long as the first.
if "HARNESS_TESTS_SHARED" not in os.environ:
    os.environ["HARNESS_TESTS_SHARED"] = tempfile.mkdtemp(prefix="harness-tests-")
_address = f"{os.environ['HARNESS_TESTS_SHARED']}/server"
_owner = int(os.environ.setdefault("HARNESS_TESTS_OWNER", str(os.getpid())))
# What a test changes in its environment must not last as long as the server.
_ENVIRONMENT = dict(os.environ)


class Forked:
    """A forked process, with the methods of `subprocess.Popen` that the sweep and the tests use.

    Args:
        program: what the process runs, which must be picklable. It ends with exit code 0 when this returns,
            otherwise as a Python program does.
        environment: all of its environment variables.
        directory: its working directory; that of this process if it is left out.
        streams: open files for its standard streams, by their numbers 0, 1 and 2; None for one that is closed. stdin
            is empty if it is left out, and the others are those of this process.
        terminal: a pseudo-terminal for its standard streams instead, which controls it.
        kept: the only open files that it inherits, but for the standard streams.
        new_session: whether it begins a session of its own, which Ctrl-C does not reach.
    """

    def __init__(
        self,
        program: Callable[[], object],
        *,
        environment: Mapping[str, str],
        directory: Path | None = None,
        streams: Mapping[int, int | None] = MappingProxyType({}),
        terminal: int | None = None,
        kept: Iterable[int] = (),
        new_session: bool = False,
    ) -> None:
        self.returncode: int | None = None
        # What it prints, where that is kept.
        self.printed: Sequence[IO[str]] = ()
        if terminal is not None:
            streams = dict.fromkeys(range(3), terminal)
        with open(os.devnull) as empty, socket.socket(socket.AF_UNIX) as asking:
            files = {0: empty.fileno(), 1: 1, 2: 2, **streams, **{file: file for file in kept}}
            inherited = {number: file for number, file in files.items() if file is not None}
            _start_server()
            asking.connect(_address)
            socket.send_fds(asking, [b"."], list(inherited.values()))
            self._connection = Connection(asking.detach())
        self._connection.send((sys.path, list(inherited)))
        where = environment, directory or Path.cwd(), terminal is not None
        self._connection.send((program, *where, new_session))
        answer = self._connection.recv()
        assert isinstance(answer, int), answer
        self.pid = answer

    def poll(self) -> int | None:
        """The exit code, negative after a signal; None while it runs."""
        if self.returncode is None and self._connection.poll():
            self.returncode = self._connection.recv()
            self._connection.close()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end, and return the exit code."""
        if self.returncode is None and not self._connection.poll(timeout):
            raise subprocess.TimeoutExpired("a forked process", timeout or 0)
        code = self.poll()
        assert code is not None
        return code

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for its end, and return what it has printed to stdout and stderr."""
        self.wait(timeout)
        stdout, stderr = self.printed
        stdout.seek(0)
        stderr.seek(0)
        return stdout.read(), stderr.read()

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            # The server may read its end meanwhile.
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)


def _start_server() -> None:
    """Start the server, unless there is one."""
    with filelock.FileLock(f"{_address}.lock"):
        if os.path.exists(_address):
            return
        environment = {**_ENVIRONMENT, "PYTHONPATH": os.pathsep.join(sys.path)}
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(_address)
            listener.listen()
            program = f"import fork_server; fork_server.serve({listener.fileno()}, {_owner})"
            subprocess.Popen(
                [sys.executable, "-c", program],
                env=environment,
                pass_fds=[listener.fileno()],
                stdin=subprocess.DEVNULL,
            )


def run(
    *arguments: str,
    cwd: Path,
    code: int | None = 0,
    streams: Mapping[int, int | None] = MappingProxyType({}),
    before: Callable[[], object] | None = None,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """`processes.run` of `python -m harness` by a fork. What it prints to other `streams` is not in the result."""
    process = begin(*arguments, cwd=cwd, streams=streams, before=before, **environment)
    stdout, stderr = process.communicate()
    assert code in (None, process.returncode), stderr
    assert process.returncode is not None
    return subprocess.CompletedProcess(arguments, process.returncode, stdout, stderr)


def start(
    *arguments: str,
    cwd: Path,
    until: str,
    before: Callable[[], object] | None = None,
    **environment: str,
) -> Forked:
    """`processes.start` of `python -m harness` by a fork; see `begin`."""
    process = begin(*arguments, cwd=cwd, before=before, **environment)
    wait_for(process, cwd, until)
    return process


def begin(
    *arguments: str,
    cwd: Path,
    streams: Mapping[int, int | None] = MappingProxyType({}),
    before: Callable[[], object] | None = None,
    **environment: str,
) -> Forked:
    """Fork a process that runs `python -m harness`; see `Forked` for `streams`.

    Args:
        before: what it does before, and each of its workers.
    """
    return begin_program(partial(command, arguments, before), cwd, streams, **environment)


def begin_program(
    program: Callable[[], object],
    cwd: Path,
    streams: Mapping[int, int | None] = MappingProxyType({}),
    **environment: str,
) -> Forked:
    """Fork a process that runs a program, and keep what it prints; see `Forked`."""
    stdout, stderr = _temporary_file(), _temporary_file()
    files = {1: stdout.fileno(), 2: stderr.fileno()}
    process = Forked(
        program,
        environment=os.environ | environment,
        directory=cwd,
        streams={**files, **streams},
    )
    process.printed = stdout, stderr
    return process


def _temporary_file() -> IO[str]:
    return tempfile.TemporaryFile("w+")


def command(arguments: Sequence[str], before: Callable[[], object] | None = None) -> None:
    """`python -m harness` in a process that was forked; workers of its sweeps are forked too."""
    from harness.cli import main as cli
    from harness.cli import worker

    worker.start_process = partial(fork_worker, before=before)
    sys.argv = ["harness", *arguments]
    if before is not None:
        before()
    cli.main()


def fork_worker(
    connection: Connection,
    environment: Mapping[str, str],
    before: Callable[[], object] | None = None,
) -> Forked:
    """A worker of a sweep, in place of `worker.start_process`; see `begin` for `before`."""
    number = connection.fileno()
    return Forked(
        partial(_serve, number, before),
        environment=environment,
        kept=[number],
        new_session=True,
    )


def _serve(number: int, before: Callable[[], object] | None) -> None:
    from harness.cli import worker

    if before is not None:
        before()
    worker.serve(number)


# The file that a command has written, in its working directory, when it halts.
HALTED = "halted"


def halting(function: str, after: int) -> Callable[[], None]:
    """What `forked` does before a command that is to wait forever in the call of a function that follows so many."""
    return partial(_replace, function, after)


def _replace(function: str, after: int) -> None:
    original = pkgutil.resolve_name(function)
    numbers = itertools.count(1)

    def call(*arguments: Any, **options: Any) -> Any:
        if next(numbers) > after:
            Path(HALTED).touch()
            while True:
                time.sleep(3600)
        return original(*arguments, **options)

    pytest.MonkeyPatch().setattr(function, call)
