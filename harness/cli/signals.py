"""Signals that end a run, raised as exceptions, and never lost.

An exception from a signal may disappear during an import: extension modules and fallbacks of libraries swallow it. So a
signal is not always raised at once. What it does depends on the mode of this process:

    POSTPONING   during imports, and while rows are        nothing yet: `raise_postponed` raises it; a
                 written                                   second signal is raised at once
    ENDING       on the command line, during imports       ends the process without an exception
                 before there are rows to write, and in
                 `leaving`
    RAISING      at all other times                        raises KeyboardInterrupt in the main thread

An exception that disappears in a destructor is raised again.
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
    """What a signal does: the table above explains each."""

    RAISING = "raising"
    POSTPONING = "postponing"
    ENDING = "ending"


_mode = _Mode.RAISING

# The error of a signal that was postponed, until it is raised.
_postponed: BaseException | None = None

# Ends the process in mode ENDING; None where signals are postponed in its place.
_end_process: Callable[[], NoReturn] | None = None

# Whether `interrupting` has the signals.
_is_interrupting = False
# Whether the process is of a program that has called `harness.run`.
_is_embedded = False

# Standard streams that were a terminal at first.
_terminals: list[int] = []

# The last signal, and the error that it raised.
_last: tuple[int, BaseException] | None = None


class TimeLimit(KeyboardInterrupt):
    """The job of a cluster that the run is part of is about to end: Slurm and submitit send SIGUSR2 before."""

    def __init__(self, reason: str = "time limit: stopped by SIGUSR2") -> None:
        super().__init__(reason)


def handle(number: int, make_error: Callable[[], BaseException]) -> None:
    """Let a signal raise an error in the main thread: at once, or later if it is postponed.

    For the rest of the process; `interrupting` goes back to the handlers before.
    """
    # Always the same error, by which `_raise_again` recognises it.
    error_once = functools.cache(make_error)

    def receive(*_: object) -> None:
        global _last, _postponed
        error = error_once()
        _last = number, error
        if number == signal.SIGHUP:
            _discard_terminal_output()
        if _mode is _Mode.ENDING and _end_process is not None:
            _end_process()
        if _mode is _Mode.RAISING or _postponed is not None:
            raise error
        _postponed = error

    signal.signal(number, receive)
    sys.unraisablehook = _raise_again


@contextmanager
def interrupting(end_process: Callable[[], NoReturn] | None = None) -> Iterator[None]:
    """Ctrl-C, SIGTERM and SIGHUP raise KeyboardInterrupt in the block, and SIGUSR2 `TimeLimit`, unless the program
    that calls has a use of its own for that.

    They are postponed until the first `raise_postponed`, because a command begins with imports.
    Signals that are ignored (`nohup`) stay ignored. Without effect in a thread, which gets no
    signals.

    Args:
        end_process: of the command line: ends the process at once instead of postponing a signal. None for a program
            that has called `harness.run`.
    """
    global _terminals, _end_process, _is_interrupting, _is_embedded
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
    # None is a handler that Python did not install, and so could not put back.
    replaced = [number for number in errors if handlers[number] not in (signal.SIG_IGN, None)]
    if handlers[signal.SIGUSR2] is not signal.SIG_DFL:
        replaced = [number for number in replaced if number != signal.SIGUSR2]
    unraisable_hook = sys.unraisablehook
    for number in replaced:
        handle(number, errors[number])
    _is_interrupting = True
    _terminals = [stream for stream in (1, 2) if os.isatty(stream)]
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
    """In a process that submitit started for a job: its time limit raises `TimeLimit` in the block.

    Submitit's own error would end the process before its rows are written. A job that is preempted is still put back
    into the queue by submitit.
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
        # As the failure of this job alone, which the launcher's other processes do not take for their own end.
        raise RunError(str(limit)) from limit
    finally:
        signal.signal(signal.SIGUSR2, before)


def _stop_raising(*, must_go_on: bool = False) -> None:
    """Let no signal raise an error from now on: it ends the process, where that is allowed, or is postponed.

    Args:
        must_go_on: always postpone it, because there are rows to write.
    """
    global _mode
    may_end = _end_process is not None and not must_go_on
    _mode = _Mode.ENDING if may_end else _Mode.POSTPONING


def _let_raise() -> BaseException | None:
    """Let signals raise at once from now on; the error of one that was postponed, which is forgotten."""
    global _mode, _postponed
    _mode = _Mode.RAISING
    error = _postponed
    _postponed = None
    return error


def raise_postponed() -> None:
    """Raise the error of a postponed signal, if there was one, and let signals raise at once."""
    error = _let_raise()
    if error is not None:
        raise error


def load(module: str, *, must_go_on: bool = False) -> Any:
    """Import a module, and torch with it, while signals end the process or are postponed.

    Afterwards they raise at once.

    Args:
        must_go_on: always postpone signals, because there are rows to write.
    """
    _stop_raising(must_go_on=must_go_on)
    is_new = module not in sys.modules
    # Importing makes millions of objects. Looking through them for garbage takes seconds: now, so
    # the collector is off, and later, so they are exempt. What a program made before would be, too.
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
    """While the block runs, a signal ends the process without an exception, where `interrupting` allows that.

    For work in other threads: an interpreter that shuts down while one of them computes is aborted.
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
    """Postpone a signal until the block has ended, because there are rows to write; a second one does not wait."""
    _stop_raising(must_go_on=True)
    try:
        yield
    except Exception:
        # Raised now, a signal would hide this error: it stays postponed until the next `raise_postponed`.
        if _postponed is None:
            _let_raise()
        raise
    except BaseException:
        # It ends everything, as the signal would have done.
        _let_raise()
        raise
    raise_postponed()


def _discard_terminal_output() -> None:
    """Discard output to a terminal that is gone: its error would hide the signal."""
    for stream in _terminals:
        if not os.isatty(stream):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream)
            os.close(null)


def _raise_again(unraisable: Any) -> None:
    """Send a signal again whose error Python discarded, because a destructor was running."""
    if _last is not None and unraisable.exc_value is _last[1]:
        # Later, and to the process, so that it wakes the main thread.
        threading.Timer(0.05, os.kill, [os.getpid(), _last[0]]).start()
    else:
        sys.__unraisablehook__(unraisable)
