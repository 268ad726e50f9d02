"""Turns the signals that end a run into exceptions, so that no signal is lost.

An exception that a signal raises during an import may disappear, because extension modules and fallbacks of libraries
swallow it. A signal is therefore not always raised immediately. Its effect depends on the mode of this process:

    mode         when                                      effect of a signal
    ENDING       on the command line, during imports       the process ends without an exception
                 before there are rows to write, and in
                 `leaving`
    POSTPONING   during other imports, and while rows      none yet: `raise_postponed` raises it later; a
                 are written (`finishing`)                 second signal is raised immediately
    RAISING      at all other times                        KeyboardInterrupt is raised in the main thread

The blocks that change the mode (`load`, `leaving`, `finishing`) must not be nested: the end of the inner block would
let signals raise in the outer one.

If an exception disappears in a destructor, the signal is sent again.
"""

from __future__ import annotations

import functools
import gc
import importlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any, NoReturn

from harness.config.errors import RunError


class _Mode(Enum):
    """The effects that a signal may have; the module's docstring explains each mode."""

    RAISING = "raising"
    POSTPONING = "postponing"
    ENDING = "ending"


_mode = _Mode.RAISING

# The error of the signal that was postponed, until it is raised or forgotten; None without one. There is at most one,
# because a second signal is raised immediately.
_postponed: BaseException | None = None

# Ends the process in mode ENDING; None if signals are postponed instead.
_end_process: Callable[[], NoReturn] | None = None

# Whether a block of `interrupting` has installed the handlers.
_is_interrupting = False
# Whether this process runs a program of the user's that has called `harness.run`.
_is_embedded = False

# The standard streams that were a terminal at the start.
_terminal_streams: list[int] = []

# The number of the last signal, and the error that it raised.
_last: tuple[int, BaseException] | None = None


class TimeLimit(KeyboardInterrupt):
    """The cluster is about to end the job that this run is part of: Slurm and submitit first send SIGUSR2."""

    def __init__(self, reason: str = "time limit: stopped by SIGUSR2") -> None:
        super().__init__(reason)


def handle(number: int, make_error: Callable[[], BaseException]) -> None:
    """Install a handler for a signal, which acts according to the mode. `make_error` makes the error that it raises.

    The handler stays for the rest of the process, unless it is replaced. `interrupting` restores the earlier handlers.
    May only be called in the main thread.
    """
    # Make the error only once, so that `_raise_again` can recognise it.
    error_once = functools.cache(make_error)

    def receive(*_: object) -> None:
        global _last, _postponed
        error = error_once()
        _last = number, error
        if number == signal.SIGHUP:
            _discard_terminal_output()
        if _mode is _Mode.ENDING and _end_process is not None:
            _end_process()  # does not return
        # While signals are postponed, a second one is raised.
        if _mode is _Mode.RAISING or _postponed is not None:
            raise error
        _postponed = error

    signal.signal(number, receive)
    sys.unraisablehook = _raise_again


@contextmanager
def interrupting(end_process: Callable[[], NoReturn] | None = None) -> Iterator[None]:
    """Within the block, Ctrl-C, SIGTERM and SIGHUP raise KeyboardInterrupt, and SIGUSR2 raises `TimeLimit`.

    A command begins with imports, so until the first `raise_postponed` signals are not raised. Signals that are ignored
    (`nohup`) stay ignored, and SIGUSR2 keeps the handler of the calling program, if it has one. In another thread than
    the main one, no handlers are set, because only the main thread gets signals.

    Args:
        end_process: for the command line: a function that ends the process immediately, in place of postponing a
            signal. None for a program that has called `harness.run`.

    Raises:
        KeyboardInterrupt: at the end of the block, if a signal is still postponed and the block raised no error.
    """
    global _terminal_streams, _end_process, _is_interrupting, _is_embedded
    _is_embedded = end_process is None
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    errors: dict[signal.Signals, Callable[[], BaseException]] = {
        signal.SIGINT: KeyboardInterrupt,
        signal.SIGTERM: functools.partial(KeyboardInterrupt, "stopped by SIGTERM"),
        signal.SIGHUP: functools.partial(KeyboardInterrupt, "stopped by SIGHUP"),
        signal.SIGUSR2: TimeLimit,
    }
    handlers = {number: signal.getsignal(number) for number in errors}
    # `getsignal` returns None for a handler that Python did not install, and that it therefore could not restore.
    replaced = [number for number in errors if handlers[number] not in (signal.SIG_IGN, None)]
    if handlers[signal.SIGUSR2] is not signal.SIG_DFL:
        replaced = [number for number in replaced if number != signal.SIGUSR2]
    unraisable_hook = sys.unraisablehook
    for number in replaced:
        handle(number, errors[number])
    _is_interrupting = True
    _terminal_streams = [stream for stream in (1, 2) if os.isatty(stream)]
    _end_process = end_process
    _stop_raising()
    try:
        yield
        raise_postponed()
    finally:
        sys.unraisablehook = unraisable_hook
        _let_raise()
        _end_process = None
        _is_interrupting = False
        for number in replaced:
            signal.signal(number, handlers[number])


@contextmanager
def within_time_limit() -> Iterator[None]:
    """In a process that submitit started for a job, make the job's time limit a RunError of the block.

    The error that submitit raises would end the process before its rows are written. Submitit's handler still runs
    first, so that a job that is preempted returns to the queue.

    No effect in other processes, in which SIGUSR2 has no handler, and within `interrupting`, which has its own.
    """
    before = signal.getsignal(signal.SIGUSR2)
    is_main = threading.current_thread() is threading.main_thread()
    if not callable(before) or _is_interrupting or not is_main:
        yield
        return

    def receive(number: int, frame: Any) -> None:
        try:
            before(number, frame)
        except Exception as error:
            raise TimeLimit from error

    signal.signal(signal.SIGUSR2, receive)
    try:
        yield
    except TimeLimit as limit:
        # A RunError is the failure of this job alone. The launcher's other processes would take a `TimeLimit` for their
        # own end.
        raise RunError(str(limit)) from limit
    finally:
        signal.signal(signal.SIGUSR2, before)


def _stop_raising(*, must_go_on: bool = False) -> None:
    """From now on let no signal raise an error: a signal ends the process if that is allowed, and is postponed if not.

    Args:
        must_go_on: postpone signals in any case, because there are rows to write.
    """
    global _mode
    may_end = _end_process is not None and not must_go_on
    _mode = _Mode.ENDING if may_end else _Mode.POSTPONING


def _let_raise() -> BaseException | None:
    """From now on let signals raise immediately. Return the error of the postponed signal, which is then forgotten;
    None if there was no signal.
    """
    global _mode, _postponed
    _mode = _Mode.RAISING
    error = _postponed
    _postponed = None
    return error


def raise_postponed() -> None:
    """Raise the error of a postponed signal, if there is one, and from now on let signals raise immediately."""
    error = _let_raise()
    if error is not None:
        raise error


def load(module: str, *, must_go_on: bool = False) -> Any:
    """Import a module, which may import torch, and return it. During the import, signals end the process or are
    postponed.

    After the import, a postponed signal is raised, and later signals raise immediately.

    Args:
        must_go_on: postpone signals in any case, because there are rows to write.

    Raises:
        ImportError, or whatever the module raises.
        KeyboardInterrupt: a signal was postponed. It takes the place of an error of the import.
    """
    _stop_raising(must_go_on=must_go_on)
    is_new = module not in sys.modules
    # Importing makes millions of objects, and searching them for garbage takes seconds. So the collector is off during
    # the import, and afterwards it skips all objects that exist then (`gc.freeze`). In a user's program it does not
    # skip them, because these would include the user's own objects.
    collects = gc.isenabled()
    gc.disable()
    try:
        return importlib.import_module(module)
    finally:
        if is_new and not _is_embedded:
            gc.freeze()
        if collects:
            gc.enable()
        raise_postponed()


@contextmanager
def leaving() -> Iterator[None]:
    """Within the block, a signal ends the process without an exception, if `interrupting` allows that.

    This is for work in other threads: an exception would shut the interpreter down, which crashes while one of them
    computes.
    """
    if _end_process is None:
        yield
        return
    _stop_raising()
    try:
        yield
    finally:
        raise_postponed()


@contextmanager
def finishing() -> Iterator[None]:
    """Postpone a signal to the end of the block, because there are rows to write. A second one is raised immediately.

    If the block raises an Exception, a signal stays postponed until the next `raise_postponed`.
    """
    _stop_raising(must_go_on=True)
    try:
        yield
    except Exception:
        # A signal that was raised now would hide this error, so it stays postponed.
        if _postponed is None:
            _let_raise()
        raise
    except BaseException:
        # This exception ends the run as the postponed signal would have done, so the signal is forgotten.
        _let_raise()
        raise
    raise_postponed()


def _discard_terminal_output() -> None:
    """Discard output to a terminal that was closed, because the error of writing to it would hide the signal."""
    for stream in _terminal_streams:
        if not os.isatty(stream):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream)
            os.close(null)


def _raise_again(unraisable: Any) -> None:
    """Send a signal again if Python discarded its error because a destructor was running."""
    if _last is not None and unraisable.exc_value is _last[1]:
        # Sent later, and to the process, so that it wakes the main thread.
        threading.Timer(0.05, os.kill, [os.getpid(), _last[0]]).start()
    else:
        sys.__unraisablehook__(unraisable)
