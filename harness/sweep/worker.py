"""The process that does a sweep's dangerous work, and the handle by which the sweep holds it.

Loading weights and running them may exhaust memory, crash inside a library or hang. So they happen in a process that
may die: it serves job after job with the pair it has loaded, and the sweep only reads what became of it.
"""

from __future__ import annotations

import faulthandler
import importlib
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType

import psutil

from harness.config.errors import HarnessError, RunError
from harness.config.settings import RunSettings

# How long a worker that was told to end may take to write what it has.
_GRACE_S = 20.0

# What a worker says when a job has ended, well or not. Otherwise it says whether it is loading a pair.
_ENDED = "ended"


@dataclass(frozen=True)
class Job:
    """One run of an experiment.

    Attributes:
        experiment: module with `run(settings, directory, keeper)`.
        directory: of the run; what it prints goes into `log.txt` there.
    """

    experiment: str
    settings: RunSettings
    directory: Path


class Worker:
    """A process for the jobs of one pair.

    Args:
        variables: environment variables of the process, set before it imports anything heavy.

    Attributes:
        loading: whether it is at work on loading the pair, or failed or died of it.
    """

    def __init__(self, variables: Mapping[str, str]) -> None:
        # Under joblib the default start method is one that the new process, told of it, does not know.
        multiprocessing.set_start_method("spawn", force=True)
        # A forked process could not start CUDA, and a daemon does not keep a finished sweep waiting.
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, dict(variables)), daemon=True)
        self._process.start()
        # With the only other copy in the process, its death is the end of the connection.
        theirs.close()
        self.loading = False

    def run(self, job: Job, timeout_s: float | None = None) -> str | None:
        """Run a job to its end, however it ends; its rows, if it wrote any, are in its directory.

        Returns:
            Why the process is gone; None where it lives and can take another job.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            self._connection.send(job)
            while self._connection.poll(None if deadline is None else max(0.0, deadline - time.monotonic())):
                message = self._connection.recv()
                if message == _ENDED:
                    return None
                self.loading = message
            return self._time_out(timeout_s)
        except (EOFError, OSError):
            return self._obituary()
        except KeyboardInterrupt:
            self._tell(signal.SIGINT)
            raise

    def close(self) -> None:
        """End the process, and with it everything it holds on a GPU."""
        self._connection.close()
        self._process.join(_GRACE_S)
        self._process.kill()
        self._process.join()

    def _tell(self, number: signal.Signals) -> bool:
        """Send a signal and wait until the job has ended of it; whether it did."""
        if self._process.pid is None or not self._process.is_alive():
            return True
        os.kill(self._process.pid, number)
        deadline = time.monotonic() + _GRACE_S
        with suppress(EOFError, OSError):
            while self._connection.poll(max(0.0, deadline - time.monotonic())):
                if self._connection.recv() == _ENDED:
                    return True
        return not self._process.is_alive()

    def _time_out(self, timeout_s: float | None) -> str:
        ended = self._tell(signal.SIGTERM)
        self._process.kill()
        reason = f"took longer than job_timeout_s={timeout_s:g}"
        return f"{reason} and was ended" if ended else f"{reason}, did not end when told to, and was killed"

    def _obituary(self) -> str:
        self._process.join(_GRACE_S)
        code = self._process.exitcode
        if code is None:
            self._process.kill()
            return "its process hung up"
        if code >= 0:
            return f"its process ended with exit code {code}"
        memory = ""
        if -code == signal.SIGKILL:
            free = psutil.virtual_memory().available / 1e9
            memory = f" (by the kernel if main memory ran out: {free:.1f} GB are free now)"
        return f"its process was killed by {signal.Signals(-code).name}{memory}"


def serve(connection: Connection, variables: Mapping[str, str]) -> None:
    """Run jobs as they come, with one pair kept loaded, until the other end hangs up. The target of the process."""
    # In a session of its own Ctrl-C reaches the sweep alone, which passes it on, once.
    os.setsid()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.update(variables)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.enable()

    from harness.experiments.setup import PairKeeper

    keeper = PairKeeper(connection.send)
    with suppress(EOFError, OSError, KeyboardInterrupt):
        while True:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            job: Job = connection.recv()
            _carry_out(job, keeper)
            connection.send(_ENDED)


def _carry_out(job: Job, keeper: object) -> None:
    job.directory.mkdir(parents=True, exist_ok=True)
    with (job.directory / "log.txt").open("ab") as log:
        # Below Python's own streams, so that what libraries print as they crash is kept as well.
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)

    def time_out(signal_number: int, frame: FrameType | None) -> None:
        raise RunError(f"took longer than job_timeout_s={job.settings.job_timeout_s:g} and was ended")

    signal.signal(signal.SIGTERM, time_out)
    try:
        importlib.import_module(job.experiment).run(job.settings, job.directory, keeper)
    except HarnessError as error:
        print(f"harness: {error}", file=sys.stderr)
    except (Exception, KeyboardInterrupt):
        traceback.print_exc()
    finally:
        # Too late: the job has ended.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.stdout.flush()
        sys.stderr.flush()


def _end_with_parent() -> None:
    """A sweep that is killed takes its worker along: nobody else would read what that measures."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)
