"""Processes forked from that of the tests, which has imported torch and transformers already.

To import both takes a new interpreter several seconds, more than most runs of the tiny pair. What
a new interpreter does differently, such as a signal during the imports, is tested with one
(`processes.run`, `processes.start`).
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import locale
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, NoReturn

import torch

from harness import cli
from harness.sweep import signals, worker
from kept_pairs import keep
from processes import TIMEOUT_S, wait_for
from remembered_configs import remember

keep()
remember()

# What most commands import, here once instead of in every process that is forked.
for _name in (
    "harness.experiments.run",
    "harness.experiments.latency",
    "harness.sweep.jobs",
    "harness.engines.local",
    "hydra.main",
    "transformers.models.llama.modeling_llama",
):
    importlib.import_module(_name)


class Forked:
    """A forked process, with the methods of `subprocess.Popen` that the sweep and the tests use.

    Args:
        program: what the process runs. It ends with exit code 0 when this returns, otherwise as a
            Python program does.
        environment: all of its environment variables.
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
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:

            def begin() -> None:
                if new_session:
                    os.setsid()
                if directory is not None:
                    os.chdir(directory)
                _open_streams(streams, terminal)
                closed = {number for number, file in streams.items() if file is None}
                _close_files({0, 1, 2, *kept} - closed)
                _become_new(environment)
                program()

            # Whatever fails, this process must not go on with the tests.
            _run(begin)

    def poll(self) -> int | None:
        """The exit code, negative after a signal; None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end, and return the exit code."""
        started = time.monotonic()
        while (code := self.poll()) is None:
            if timeout is not None and time.monotonic() - started > timeout:
                raise subprocess.TimeoutExpired("a forked process", timeout)
            time.sleep(0.005)
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
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)


def run(
    *arguments: str,
    cwd: Path,
    code: int | None = 0,
    streams: Mapping[int, int | None] = MappingProxyType({}),
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """`processes.run` of `python -m harness` by a fork. What it prints to other `streams` is not in the result."""
    process = begin(*arguments, cwd=cwd, streams=streams, **environment)
    stdout, stderr = process.communicate(TIMEOUT_S)
    assert code in (None, process.returncode), stderr
    assert process.returncode is not None
    return subprocess.CompletedProcess(arguments, process.returncode, stdout, stderr)


def start(*arguments: str, cwd: Path, until: str, **environment: str) -> Forked:
    """`processes.start` of `python -m harness` by a fork."""
    process = begin(*arguments, cwd=cwd, **environment)
    wait_for(process, cwd, until)
    return process


def begin(
    *arguments: str,
    cwd: Path,
    streams: Mapping[int, int | None] = MappingProxyType({}),
    **environment: str,
) -> Forked:
    """Fork a process that runs `python -m harness`; see `Forked` for `streams`."""
    return begin_program(lambda: command(arguments), cwd, streams, **environment)


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


def command(arguments: Sequence[str]) -> None:
    """`python -m harness` in a process that was forked; workers of its sweeps are forked too."""
    worker.start_process = fork_worker
    sys.argv = ["harness", *arguments]
    cli.main()


def fork_worker(
    connection: Connection, environment: Mapping[str, str], locks: Sequence[int]
) -> Forked:
    """A worker of a sweep, in place of `worker.start_process`."""
    number = connection.fileno()
    return Forked(
        lambda: worker.serve(number),
        environment=environment,
        kept=[number, *locks],
        new_session=True,
    )


def _open_streams(streams: Mapping[int, int | None], terminal: int | None) -> None:
    if terminal is not None:
        os.login_tty(terminal)
        return
    if 0 not in streams:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, file in streams.items():
        if file is not None:
            os.dup2(file, number)


def _close_files(kept: set[int]) -> None:
    """Close all files but these. An end of a pipe that stayed open would hide that the other one is closed."""
    numbers = [-1, *sorted(kept)]
    for number, following in zip(numbers, [*numbers[1:], 1 << 16], strict=True):
        # An empty range of 0 would close everything.
        if number + 1 < following:
            os.closerange(number + 1, following)


def _become_new(environment: Mapping[str, str]) -> None:
    """Turn a copy of the tests' process into what looks like a new one to our code."""
    # Nothing of the tests is destroyed here, which could close a file that has the same number.
    gc.freeze()
    faulthandler.disable()
    os.environ.clear()
    os.environ.update(environment)
    if _speaks_ascii():
        # Files that name no encoding follow it.
        locale.setlocale(locale.LC_CTYPE, "POSIX")
    errors = environment.get("PYTHONIOENCODING", "").partition(":")[2] or "strict"
    sys.stdin = _stream(0)
    sys.stdout = _stream(1, mode="w", errors=errors)
    sys.stderr = _stream(2, mode="w", buffering=1, errors="backslashreplace")
    _log_to_stderr()
    # The first use after a fork makes the pool of threads again, for which two threads must not race.
    torch.set_num_threads(torch.get_num_threads())
    # This process may be the copy of one that runs a command.
    signals._postponed = signals._end_process = None
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def _speaks_ascii() -> bool:
    return os.environ.get("LC_ALL") == "POSIX"


def _stream(number: int, mode: str = "r", **options: Any) -> Any:
    """A standard stream as Python makes it: None where the file is closed, ASCII where LC_ALL=POSIX says so."""
    try:
        os.fstat(number)
    except OSError:
        return None
    encoding = "ascii" if _speaks_ascii() else "utf-8"
    return os.fdopen(number, mode, encoding=encoding, closefd=False, **options)


def _log_to_stderr() -> None:
    """Let libraries that were imported by the tests log to this process's stderr."""
    known = [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]
    for logger in known:
        for handler in getattr(logger, "handlers", ()):
            if type(handler) is logging.StreamHandler:
                # `setStream` flushes the stream of before, which is closed here.
                handler.stream = sys.stderr


def _run(program: Callable[[], object]) -> NoReturn:
    """Run the program, and end the process as an interpreter does."""
    code = 1
    try:
        program()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            for stream in (sys.stdout, sys.stderr):
                if stream is not None:
                    stream.flush()
        finally:
            os._exit(code)
