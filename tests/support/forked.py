"""Processes forked from a server that has imported torch and transformers already (`preloaded`).

To import both takes a new interpreter several seconds, more than most runs of the tiny pair. What
a new interpreter does differently, such as a signal during the imports, is tested with one
(`processes.run`, `processes.start`).
"""

import gc
import itertools
import logging
import multiprocessing.forkserver
import os
import pkgutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

import pytest

from processes import wait_for

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["preloaded"])


class _File:
    """An open file; a process that is forked gets its own number of it."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        return _number_of, (reduction.DupFd(self.number),)


def _number_of(file: Any) -> int:
    return int(file.detach())


class Forked(CONTEXT.Process):  # type: ignore[name-defined]
    """A forked process, with the methods of `subprocess.Popen` that the sweep and the tests use.

    Args:
        program: what the process runs, which must be picklable. It ends with exit code 0 when this returns,
            otherwise as a Python program does.
        environment: all of its environment variables.
        directory: its working directory; that of this process if it is left out.
        streams: open files for its standard streams, by their numbers 0, 1 and 2; None for one that is closed. stdin
            is empty if it is left out, and the others are those of this process.
        terminal: a pseudo-terminal for its standard streams instead, which controls it.
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
        new_session: bool = False,
    ) -> None:
        super().__init__()
        self._program, self._environment = program, dict(environment)
        self._directory, self._new_session = directory or Path.cwd(), new_session
        self._terminal: Any = None if terminal is None else _File(terminal)
        # What it prints, where that is kept.
        self.printed: Sequence[IO[str]] = ()
        with open(os.devnull) as empty:
            files = {0: empty.fileno(), 1: 1, 2: 2, **streams}
            self._streams: dict[int, Any] = {
                number: None if file is None else _File(file) for number, file in files.items()
            }
            self.start()

    @property
    def returncode(self) -> int | None:
        """The exit code, negative after a signal; None while it runs."""
        return self.exitcode

    def poll(self) -> int | None:
        """The exit code, or None."""
        return self.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end, and return the exit code."""
        self.join(timeout)
        if self.exitcode is None:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0)
        return self.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for its end, and return what it has printed to stdout and stderr."""
        self.wait(timeout)
        stdout, stderr = self.printed
        stdout.seek(0)
        stderr.seek(0)
        return stdout.read(), stderr.read()

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.exitcode is None:
            assert self.pid is not None
            # The server may read its end meanwhile.
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def run(self) -> None:
        """In the process: turn a copy of the server into what looks like a new process to our code."""
        # It forks from the same server.
        multiprocessing.forkserver._forkserver.ensure_running = lambda: None
        # Nothing of the server is destroyed here, which could close a file that has the same number.
        gc.freeze()
        os.chdir(self._directory)
        if self._new_session:
            os.setsid()
        for number, file in self._streams.items():
            if file is None:
                os.close(number)
            else:
                os.dup2(file, number)
        for file in filter(None, self._streams.values()):
            os.close(file)
        if self._terminal is not None:
            os.login_tty(self._terminal)
        os.environ.clear()
        os.environ.update(self._environment)
        errors = os.environ.get("PYTHONIOENCODING", "").partition(":")[2] or "strict"
        sys.stdin = _stream(0)
        sys.stdout = _stream(1, mode="w", errors=errors)
        sys.stderr = _stream(2, mode="w", buffering=1, errors="backslashreplace")
        _log_to_stderr()
        self._program()


def _stream(number: int, mode: str = "r", **options: Any) -> Any:
    """A standard stream as Python makes it: None where the file is closed."""
    try:
        os.fstat(number)
    except OSError:
        return None
    return os.fdopen(number, mode, encoding="utf-8", closefd=False, **options)


def _log_to_stderr() -> None:
    """Let libraries that are imported already log to this process's stderr."""
    known = [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]
    for logger in known:
        for handler in getattr(logger, "handlers", ()):
            if type(handler) is logging.StreamHandler:
                # `setStream` flushes the stream of before, which is closed here.
                handler.stream = sys.stderr


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
    kept = {1: stdout.fileno(), 2: stderr.fileno(), **streams}
    variables = os.environ | environment
    process = Forked(program, environment=variables, directory=cwd, streams=kept)
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
    return Forked(partial(_serve, connection, before), environment=environment, new_session=True)


def _serve(connection: Connection, before: Callable[[], object] | None) -> None:
    from harness.cli import worker

    if before is not None:
        before()
    worker.serve(connection.fileno())


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
