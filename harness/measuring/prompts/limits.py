"""Work that a stranger's files decide, such as chat templates, in a process that may be ended."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from harness.config.errors import SettingError

Result = TypeVar("Result")

# Processor time and memory, and what each letter of the texts adds: tokenizers read a million in a second.
_SECONDS = 20
_LETTERS_PER_SECOND = 50_000
_BYTES = 2 << 30
_BYTES_PER_LETTER = 200
_PARALLELISM = "TOKENIZERS_PARALLELISM"
# The exit code of an error that is no lack of memory.
_FAILED = 4


def within_limits(work: Callable[[], Result], num_letters: int, setting: str) -> Result:
    """The result of the work, which a copy of this process has done; elsewhere than on Linux this process does it.

    Args:
        num_letters: of the texts that it reads.
        setting: to blame.

    Raises:
        SettingError: it needs more processor time or memory than any honest file.
    """
    if sys.platform != "linux":
        return work()
    seconds = _SECONDS + num_letters // _LETTERS_PER_SECOND
    num_bytes = _BYTES + num_letters * _BYTES_PER_LETTER
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(work, sender, seconds, num_bytes))
    before = os.environ.get(_PARALLELISM)
    # Tokenizers would wait for threads, which the copy does not have, and warn of that. Servers that are started later
    # must not inherit it.
    os.environ[_PARALLELISM] = "false"
    with warnings.catch_warnings():
        # Python warns of the copy of a process with threads: none of their locks is needed here.
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    del os.environ[_PARALLELISM]
    if before is not None:
        os.environ[_PARALLELISM] = before
    sender.close()
    try:
        with suppress(EOFError):
            result: Result = receiver.recv()
            return result
        process.join()
    finally:
        process.kill()
        process.join()
    if process.exitcode == _FAILED:
        # It has an end, and its error is raised here.
        return work()
    limit = f"{num_bytes / 1e9:.1f} GB of memory"
    if process.exitcode == -signal.SIGXCPU:
        limit = f"{seconds} s of processor time"
    rule = f"the model's tokenizer and chat template need more than {limit} for the prompts"
    raise SettingError(setting, rule)


def _work(work: Callable[[], Any], sender: Connection, seconds: int, num_bytes: int) -> None:
    """Do the work in the copy, and send its result."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    # Rust writes a line before it ends the process.
    os.dup2(os.open(os.devnull, os.O_RDWR), 2)
    with open("/proc/self/statm", encoding="ascii") as statistics:
        num_pages = int(statistics.read().split()[0])
    num_bytes += num_pages * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))
    try:
        sender.send(work())
    except MemoryError:
        sys.exit(1)
    except Exception:
        sys.exit(_FAILED)
