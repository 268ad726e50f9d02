"""Processes forked from that of the tests, which has imported torch and transformers already.

To import both takes a new interpreter several seconds, more than most runs of the tiny pair. What
a new interpreter does differently, such as a signal during the imports, is tested with one
(`processes.run`, `processes.start`).
"""

from __future__ import annotations

import faulthandler
import gc
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
from typing import IO, NoReturn

import torch

from harness import cli
from harness.sweep import signals, worker
from processes import TIMEOUT_S, wait_for


class Forked:
    """A forked process, with the methods of `subprocess.Popen` that the sweep and the tests use.

    Args:
        program: what the process runs. It ends with exit code 0 when this returns, otherwise as a
            Python program does.
        environment: all of its environment variables.
        output: files for its stdout and stderr; empty for those of this process.
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
        output: Sequence[IO[str]] = (),
        terminal: int | None = None,
        kept: Iterable[int] = (),
        new_session: bool = False,
    ) -> None:
        self.returncode: int | None = None
        self.output = output
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:

            def begin() -> None:
                if new_session:
                    os.setsid()
                if directory is not None:
                    os.chdir(directory)
                _open_streams(output, terminal)
                _close_files({0, 1, 2, *kept})
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
        stdout, stderr = self.output
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
    *arguments: str, cwd: Path, code: int | None = 0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """`processes.run` of `python -m harness` by a fork."""
    process = _fork_command(arguments, cwd, environment)
    stdout, stderr = process.communicate(TIMEOUT_S)
    assert code in (None, process.returncode), stderr
    assert process.returncode is not None
    return subprocess.CompletedProcess(arguments, process.returncode, stdout, stderr)


def start(*arguments: str, cwd: Path, until: str, **environment: str) -> Forked:
    """`processes.start` of `python -m harness` by a fork."""
    process = _fork_command(arguments, cwd, environment)
    wait_for(process, cwd, until)
    return process


def _fork_command(
    arguments: Sequence[str], directory: Path, environment: Mapping[str, str]
) -> Forked:
    return Forked(
        lambda: command(arguments),
        environment=os.environ | environment,
        directory=directory,
        output=[tempfile.TemporaryFile("w+") for _ in range(2)],
    )


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


def _open_streams(output: Sequence[IO[str]], terminal: int | None) -> None:
    if terminal is not None:
        os.login_tty(terminal)
        return
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, stream in enumerate(output, start=1):
        os.dup2(stream.fileno(), number)


def _close_files(kept: set[int]) -> None:
    """Close all files but these. An end of a pipe that stayed open would hide that the other one is closed."""
    numbers = sorted(kept)
    for number, following in zip(numbers, [*numbers[1:], 1 << 16], strict=True):
        os.closerange(number + 1, following)


def _become_new(environment: Mapping[str, str]) -> None:
    """Turn a copy of the tests' process into what looks like a new one to our code."""
    # Nothing of the tests is destroyed here, which could close a file that has the same number.
    gc.freeze()
    faulthandler.disable()
    os.environ.clear()
    os.environ.update(environment)
    errors = environment.get("PYTHONIOENCODING", "").partition(":")[2] or "strict"
    sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", errors=errors, closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)
    _log_to_stderr()
    # The first use after a fork makes the pool of threads again, for which two threads must not race.
    torch.set_num_threads(torch.get_num_threads())
    # This process may be the copy of one that runs a command.
    signals._waiting = signals._leave = None
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


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
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)
