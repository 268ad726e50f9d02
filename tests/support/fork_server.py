"""The server from which `forked` has its processes. It has imported what most commands need.

It has one thread. The process of the tests has more: those of pytest-xdist, of torch's compiler, of servers. A fork of
it would have none of them, but every lock that they held, and wait forever for what only they could do.
"""

from __future__ import annotations

import fcntl
import gc
import importlib
import logging
import os
import pickle
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import psutil

import garbage

_IMPORTED = (
    "harness.cli.main",
    "harness.commands.run",
    "harness.commands.latency.measure",
    "harness.commands.recovery.measure",
    "harness.commands.serve.command",
    "harness.cli.sweep",
    "harness.local.engine.engine",
    "harness.local.engine.planning",
    "hydra.main",
    "kept_pairs",
    "pytest",
    "remembered_configs",
    "scipy.stats",
    "transformers.models.llama.modeling_llama",
    "uvicorn.lifespan.on",
    "uvicorn.protocols.http.h11_impl",
)
# More than any process has open.
_MOST_FILES = 1 << 16


def serve(listening: int, owner: int) -> None:
    """Fork a process for each connection, while the owner lives; what it needs to know is read from there.

    Its number is sent there, and its exit code when it has ended.
    """
    # As in tests/conftest.py.
    os.fsync = lambda descriptor: None
    garbage.leave_imports()
    modules = {name: importlib.import_module(name) for name in _IMPORTED}
    modules["kept_pairs"].keep()
    modules["remembered_configs"].remember()
    # Any figure will do.
    modules["harness.local.engine.planning"]._SECONDS = 0.01
    garbage.exempt_imports()
    listener = socket.socket(fileno=listening)
    connections: dict[int, Connection] = {}
    # The end of a process interrupts the wait for connections.
    ended, ending = os.pipe()
    os.set_blocking(ending, False)
    signal.set_wakeup_fd(ending)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while psutil.pid_exists(owner):
        readable, _, _ = select.select([ended, listener], [], [], 1.0)
        if ended in readable:
            os.read(ended, 4096)
            _send_exit_codes(connections)
        if listener in readable:
            _fork(listener.accept()[0], connections)


def _send_exit_codes(connections: dict[int, Connection]) -> None:
    while connections:
        number, status = os.waitpid(-1, os.WNOHANG)
        if not number:
            return
        # Perhaps nobody waits for it any more.
        with connections.pop(number) as connection, suppress(OSError):
            connection.send(os.waitstatus_to_exitcode(status))


def _fork(accepted: socket.socket, connections: dict[int, Connection]) -> None:
    num_threads = psutil.Process().num_threads()
    if num_threads > 1:
        Connection(accepted.detach()).send(
            f"the server has {num_threads} threads: it must not fork"
        )
        return
    number = os.fork()
    if number == 0:
        # Whatever fails, this process must not go on with the server's work.
        _run(lambda: _begin(accepted))
    connections[number] = Connection(accepted.detach())
    with suppress(OSError):
        connections[number].send(number)


def _begin(accepted: socket.socket) -> None:
    """Become the process that was asked for."""
    signal.set_wakeup_fd(-1)
    _, files, _, _ = socket.recv_fds(accepted, 1, _MOST_FILES)
    connection = Connection(accepted.detach())
    sys.path[:], numbers = connection.recv()
    request = connection.recv_bytes()
    connection.close()
    _open_files(dict(zip(numbers, files, strict=True)))
    program, environment, directory, has_terminal, new_session = pickle.loads(request)
    os.chdir(directory)
    if new_session:
        os.setsid()
    if has_terminal:
        os.login_tty(0)
    _become_new(environment)
    program()


def _open_files(files: Mapping[int, int]) -> None:
    """Give files these numbers, and close all others. An end of a pipe that stayed open would hide that the other
    one is closed."""
    above = 1 + max([*files, *files.values()])
    copies = {number: fcntl.fcntl(file, fcntl.F_DUPFD, above) for number, file in files.items()}
    os.closerange(0, above)
    for number, copy in copies.items():
        os.dup2(copy, number)
    os.closerange(above, _MOST_FILES)


def _become_new(environment: Mapping[str, str]) -> None:
    """Turn a copy of the server into what looks like a new process to our code."""
    # Nothing of the server is destroyed here, which could close a file that has the same number.
    gc.freeze()
    os.environ.clear()
    os.environ.update(environment)
    errors = environment.get("PYTHONIOENCODING", "").partition(":")[2] or "strict"
    sys.stdin = _stream(0)
    sys.stdout = _stream(1, mode="w", errors=errors)
    sys.stderr = _stream(2, mode="w", buffering=1, errors="backslashreplace")
    _log_to_stderr()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


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
