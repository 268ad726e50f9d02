"""Work that a stranger's files decide, such as chat templates, in a process that may be ended."""

from __future__ import annotations

import os
import pickle
import resource
import signal
import sys
import warnings
from collections.abc import Callable
from typing import NoReturn, TypeVar

from harness.config.errors import SettingError

Result = TypeVar("Result")

# Processor time and memory, and what each letter of the texts adds: tokenizers read a million in a second.
_SECONDS = 20
_LETTERS_PER_SECOND = 50_000
_BYTES = 2 << 30
_BYTES_PER_LETTER = 200
# Exit codes.
_TOO_LARGE, _FAILED = 3, 4


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
    # The copy has no threads: a tokenizer that waits for them would wait for ever.
    threads = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        # Python warns of the copy of a process with threads: none of their locks is needed here.
        warnings.simplefilter("ignore", DeprecationWarning)
        process = os.fork()
    if not process:
        os.close(reader)
        _work(work, writer, seconds, num_bytes)
    os.close(writer)
    if threads is None:
        del os.environ["TOKENIZERS_PARALLELISM"]
    else:
        os.environ["TOKENIZERS_PARALLELISM"] = threads
    try:
        with os.fdopen(reader, "rb") as pipe:
            content = pipe.read()
    except BaseException:
        os.kill(process, signal.SIGKILL)
        raise
    finally:
        _, status = os.waitpid(process, 0)
    code = os.waitstatus_to_exitcode(status)
    if not code:
        result: Result = pickle.loads(content)
        return result
    if code == _FAILED:
        # It has an end, and its error is raised here.
        return work()
    limit = f"{num_bytes / 1e9:.1f} GB of memory"
    if code == -signal.SIGXCPU:
        limit = f"{seconds} s of processor time"
    rule = f"the model's tokenizer and chat template need more than {limit} for the prompts"
    raise SettingError(setting, rule)


def _work(work: Callable[[], object], writer: int, seconds: int, num_bytes: int) -> NoReturn:
    """Do the work in the copy, and write its result."""
    code = _FAILED
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        with open("/proc/self/statm", encoding="ascii") as statistics:
            num_pages = int(statistics.read().split()[0])
        num_bytes += num_pages * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
        resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))
        content = pickle.dumps(work())
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(content)
        code = 0
    except MemoryError:
        code = _TOO_LARGE
    finally:
        os._exit(code)
