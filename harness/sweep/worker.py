"""Processes that run jobs and may die, and the handle by which the sweep controls them.

Loading weights and running them may exhaust memory, crash inside a library or hang. So that happens in a process that
may die. It runs job after job with the pair that it has loaded, and the sweep reads the files that it writes.

Where a model is split over ranks, each rank is such a process, and all run the same job. Rank 0 alone prints and
writes. When one fails or dies the others would wait for it, so they are ended.
"""

from __future__ import annotations

import faulthandler
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from queue import SimpleQueue
from types import MappingProxyType, ModuleType

import psutil

from harness.config.errors import HarnessError, RunError, in_one_line
from harness.config.run import RunSettings
from harness.results.files import write_nothing
from harness.results.measurement import newest_run
from harness.results.schema import RUN_KINDS, RunRow
from harness.sweep import signals

# How long a rank may take to write its rows and end after an error was raised in it.
_GRACE_S = 20.0
# How long ranks may go on after one of them has failed: they soon notice.
_RANKS_GRACE_S = 10.0


@dataclass(frozen=True)
class Job:
    """One run of an experiment, alone or in a sweep.

    Attributes:
        command: `latency` and the like; names the file of its rows.
        experiment: the command's module.
        directory: of the run.
        sweep: the directory of the sweep that the job is part of; its output then goes into its `log.txt`.
        number: among the sweep's jobs, from 0.
        overrides: the job's settings, as typed.
    """

    command: str
    experiment: str
    settings: RunSettings
    directory: Path
    sweep: Path | None = None
    number: int = 0
    overrides: Sequence[str] = ()

    @property
    def file(self) -> Path:
        """The run's own file of rows."""
        return self.directory / f"{self.command}.csv"

    def run(self, directory: Path | None = None, keeper: object = None) -> Sequence[RunRow]:
        """Run it in this process, with the pair that the keeper holds.

        Raises:
            HarnessError: what ended it, or its bad answer.
        """
        signals.load(self.experiment)
        rows: Sequence[RunRow] = _session().run(
            self.experiment, self.settings, directory or self.directory, keeper
        )
        return rows

    def rows(self) -> Sequence[RunRow]:
        """The rows that the run has written, if any."""
        return newest_run(self.file, row_kind(self.command))

    def rows_or_failure(self, reason: str) -> Sequence[RunRow]:
        """The run's rows, or rows that say why there are none, which needs torch in this process, but no GPU."""
        return self.rows() or _session().record_failure(
            self.experiment, self.settings, self.directory, reason
        )


def row_kind(command: str) -> type[RunRow]:
    """The kind of a command's rows."""
    return next(kind for kind in RUN_KINDS if kind.kind == command)


class Worker:
    """A process for the jobs of one pair, or one per rank.

    A process sends bools, whether it is loading the pair, and at the end of a job what ended it early, or None, and
    whether it ends as well.

    Args:
        num_ranks: processes over which models are split.
        gpus: the only ones that the processes see, each with the lock that they inherit; see `lease`. Empty for all.

    Attributes:
        loading: whether it is loading the pair, or failed or died while it did.
        spent: whether it runs no more jobs.
    """

    def __init__(self, num_ranks: int, gpus: Mapping[str, int] = MappingProxyType({})) -> None:
        self.loading = self.spent = False
        self._connections: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        # Of letters that stdout lacks, see `prepare_streams`.
        common = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "PYTHONIOENCODING": ":replace",
        }
        if gpus:
            common["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        for meeting in _meeting_point(num_ranks):
            ours, theirs = Pipe()
            program = f"from harness.sweep.worker import serve; serve({theirs.fileno()})"
            # In its own session Ctrl-C reaches the sweep alone, which passes it on once.
            process = subprocess.Popen(
                [sys.executable, "-c", program],
                env=common | meeting,
                pass_fds=[theirs.fileno(), *gpus.values()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            # With the only other copy in the process, its death ends the connection.
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)
        for lock in gpus.values():
            os.close(lock)

    def run(self, job: Job, timeout_s: float | None = None) -> HarnessError | None:
        """Run a job to its end; its rows, if it wrote any, are in its directory.

        Returns:
            What ended it early, or its bad answer.
        """
        try:
            for connection in self._connections:
                # A dead one is noticed later.
                with suppress(OSError):
                    connection.send(job)
            return self._watch(timeout_s)
        except KeyboardInterrupt as interrupt:
            self._end(interrupt)
            raise

    def close(self) -> None:
        """Kill the processes, and free everything they hold on a GPU."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()

    def _watch(self, timeout_s: float | None) -> HarnessError | None:
        """Wait for each rank's answer. The first error is the reason: those of other ranks follow from it."""
        error: HarnessError | None = None
        deadline = time.monotonic() + (timeout_s or math.inf)
        unanswered = dict(zip(self._connections, range(len(self._connections)), strict=True))
        while unanswered:
            rest = deadline - time.monotonic()
            if rest <= 0:
                error = error or RunError(
                    f"took longer than job_timeout_s={timeout_s:g} and was ended"
                )
                self.spent = True
                self._end(error)
                return error
            for connection in wait(list(unanswered), min(rest, 3600)):
                assert isinstance(connection, Connection)
                try:
                    answer = connection.recv()
                except (EOFError, OSError):
                    answer = RunError(self._cause_of_death(unanswered[connection])), True
                if isinstance(answer, bool):
                    self.loading = answer
                    continue
                del unanswered[connection]
                reason, spent = answer
                self.spent = self.spent or spent
                if reason is not None:
                    error = error or reason
                    deadline = min(deadline, time.monotonic() + _RANKS_GRACE_S)
        return error

    def _end(self, error: BaseException) -> None:
        """Raise an error in rank 0, which then writes its rows, and end all ranks."""
        try:
            with suppress(OSError, subprocess.TimeoutExpired):
                self._connections[0].send(error)
                self._processes[0].wait(_GRACE_S)
        finally:
            self.close()

    def _cause_of_death(self, rank: int) -> str:
        its = "its process" if len(self._processes) == 1 else f"the process of rank {rank}"
        if (code := self._processes[rank].wait()) >= 0:
            return f"{its} ended with exit code {code}"
        free = psutil.virtual_memory().available / 1e9
        memory = f" (by the kernel if main memory ran out: {free:.1f} GB are free now)"
        return f"{its} was killed by {signal.Signals(-code).name}{memory if -code == signal.SIGKILL else ''}"


def serve(file_descriptor: int) -> None:
    """Run jobs as they come, with one pair kept loaded, until the connection ends. The program of a process."""
    connection = Connection(file_descriptor)
    jobs: SimpleQueue[Job] = SimpleQueue()
    sent: list[BaseException] = []

    def receive() -> None:
        with suppress(EOFError, OSError):
            while True:
                if isinstance(message := connection.recv(), Job):
                    jobs.put(message)
                else:
                    sent.append(message)
                    os.kill(os.getpid(), signal.SIGTERM)
        # When the sweep is gone nobody reads these measurements.
        os._exit(1)

    faulthandler.enable()
    with suppress(OSError, KeyboardInterrupt, RunError):
        signals.handle(
            signal.SIGTERM, lambda: sent[0] if sent else KeyboardInterrupt("stopped by SIGTERM")
        )
        threading.Thread(target=receive, daemon=True).start()
        rank = int(os.environ.get("RANK", "0"))
        if rank:
            write_nothing()
        job = jobs.get()
        for name, value in job.settings.engine.environment.items():
            os.environ.setdefault(name, value)
        # This imports torch, which has to find those variables.
        keeper = _session().PairKeeper(connection.send)
        while True:
            error = _run(job, keeper, rank)
            spent = isinstance(error, RunError) or keeper.is_spoiled()
            connection.send((error, spent))
            if spent:
                break
            job = jobs.get()
    # Do not wait for a group of ranks: the others may be gone.
    os._exit(0)


def _run(job: Job, keeper: object, rank: int) -> HarnessError | None:
    """Run the job, and return what ended it early. What other ranks print is kept where one fails."""
    directory = job.directory / f"rank-{rank}" if rank else job.directory
    directory.mkdir(parents=True, exist_ok=True)
    if logged := bool(rank or job.sweep):
        with (directory / "log.txt").open("ab") as log:
            # Below Python's own streams, to keep what libraries print as they crash.
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
    error: HarnessError | None = None
    try:
        job.run(directory, keeper)
    except HarnessError as known:
        error = known
    except Exception as exception:
        error = RunError(in_one_line(exception))
        # Shown with the traceback of the error, in the process that raises it.
        error.add_note(traceback.format_exc())
    finally:
        sys.stdout.flush()
    if logged and error is not None:
        print(
            f"harness: {error}",
            *getattr(error, "__notes__", ()),
            sep="\n",
            file=sys.stderr,
            flush=True,
        )
    if not rank:
        return error
    if not isinstance(error, RunError):
        shutil.rmtree(directory)
        return error
    return RunError(f"rank {rank}: {error}")


def _session() -> ModuleType:
    """The module that runs experiments, which imports torch."""
    session: ModuleType = signals.load("harness.experiments.session", must_go_on=True)
    return session


def _meeting_point(num_ranks: int) -> list[dict[str, str]]:
    """For each rank the variables by which they find each other, named as torchrun names them."""
    if num_ranks == 1:
        return [{}]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        shared = {
            "WORLD_SIZE": str(num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free.getsockname()[1]),
        }
    return [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)]
