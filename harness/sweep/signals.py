"""Signals that end a run, raised as exceptions, and never lost.

An exception from a signal may disappear during an import: extension modules and fallbacks of
libraries swallow it. So while libraries are imported a signal ends the process without an
exception, or is postponed if rows must be written first. An exception that disappears in a
destructor is raised again.
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
from typing import Any, NoReturn

# While signals are postponed: the error that the first one will raise. None while they raise at
# once.
_waiting: list[BaseException] | None = None
# Ends the process instead of postponing a signal; None to postpone it.
_leave: Callable[[], NoReturn] | None = None
# Standard streams that were a terminal at first.
_terminals: list[int] = []
# The last signal, and the error that it raised.
_last: tuple[int, BaseException] | None = None


def handle(number: int, error: Callable[[], BaseException]) -> None:
    """Let a signal raise `error()` in the main thread: at once, or in `obey` if it is postponed."""
    once = functools.cache(error)

    def receive(*_: object) -> None:
        global _last
        _last = number, once()
        if number == signal.SIGHUP:
            _leave_terminals()
        if _waiting is not None and _leave is not None:
            _leave()
        # The second one does not wait.
        if _waiting is None or _waiting:
            raise _last[1]
        _waiting.append(_last[1])

    signal.signal(number, receive)
    sys.unraisablehook = _raise_again


@contextmanager
def interrupting(leave: Callable[[], NoReturn] | None = None) -> Iterator[None]:
    """Ctrl-C, SIGTERM and SIGHUP raise KeyboardInterrupt in the block, and are postponed at first.

    Signals that are ignored (`nohup`) stay ignored. Without effect in a thread, which gets no
    signals.

    Args:
        leave: ends the process at once instead of postponing a signal.
    """
    global _waiting, _terminals, _leave
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reasons = {
        signal.SIGINT: (),
        signal.SIGTERM: ("stopped by SIGTERM",),
        signal.SIGHUP: ("stopped by SIGHUP",),
    }
    handlers = {number: signal.getsignal(number) for number in reasons}
    unraisable_hook = sys.unraisablehook
    for number, reason in reasons.items():
        if handlers[number] is not signal.SIG_IGN:
            handle(number, functools.partial(KeyboardInterrupt, *reason))
    _waiting = []
    _terminals = [stream for stream in (1, 2) if os.isatty(stream)]
    _leave = leave
    try:
        yield
        obey()
    finally:
        sys.unraisablehook = unraisable_hook
        _waiting = None
        _leave = None
        for number, handler in handlers.items():
            signal.signal(number, handler)


def obey() -> None:
    """Raise the error of a postponed signal, if there was one, and let signals raise at once."""
    global _waiting
    postponed = _waiting
    _waiting = None
    if postponed:
        raise postponed[0]


def load(module: str, *, must_go_on: bool = False) -> Any:
    """Import a module, and torch with it, while signals end the process or are postponed.

    Args:
        must_go_on: postpone signals in every process, because there are rows to write.
    """
    global _waiting, _leave
    leave = _leave
    _waiting = _waiting or []
    if must_go_on:
        _leave = None
    is_new = module not in sys.modules
    # Importing makes millions of objects; looking through them for garbage takes seconds, now and later.
    gc.disable()
    try:
        return importlib.import_module(module)
    finally:
        if is_new:
            gc.freeze()
        gc.enable()
        _leave = leave
        obey()


@contextmanager
def leaving() -> Iterator[None]:
    """While the block runs, a signal ends the process without an exception, where the process may end so.

    For work in other threads: an interpreter that shuts down while one of them computes is aborted.
    """
    global _waiting
    if _leave is None:
        yield
        return
    _waiting = _waiting or []
    try:
        yield
    finally:
        obey()


@contextmanager
def finishing() -> Iterator[None]:
    """Postpone a signal until the block has ended, because there are rows to write; a second one does not wait."""
    global _waiting, _leave
    leave = _leave
    _waiting = _waiting or []
    _leave = None
    try:
        yield
    except BaseException:
        # It ends the run as well.
        _waiting = None
        raise
    finally:
        _leave = leave
    obey()


def _leave_terminals() -> None:
    """Discard output to a terminal that is gone: its error would hide the signal."""
    for stream in _terminals:
        if not os.isatty(stream):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream)
            os.close(null)


def _raise_again(unraisable: Any) -> None:
    if _last is not None and unraisable.exc_value is _last[1]:
        # Later, and to the process, so that it wakes the main thread.
        threading.Timer(0.05, os.kill, [os.getpid(), _last[0]]).start()
    else:
        sys.__unraisablehook__(unraisable)
