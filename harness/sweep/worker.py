"""The process that does a sweep's dangerous work, or several that share it, and the handle by which the sweep holds it.

Loading weights and running them may exhaust memory, crash inside a library or hang. So they happen in a process that
may die: it serves job after job with the pair it has loaded, and the sweep only reads what became of it.

Where a model is split over ranks, each rank is such a process and all serve the same job. Rank 0 alone prints and
writes. One that fails or dies leaves the others waiting for it, so that it ends them all.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import importlib
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import FrameType

import psutil

from harness.config.commands import RunSettings
from harness.config.errors import HarnessError, RunError
from harness.results.files import write_nothing

# How long a worker that was told to end may take to write what it has.
_GRACE_S = 20.0

# How long the other ranks may take to end when one has.
_RANKS_GRACE_S = 10.0


@dataclass(frozen=True)
class Ended:
    """What a worker says when a job has ended; otherwise it says whether it is loading a pair.

    Attributes:
        error: why it did not end well; it is printed already where the job is logged.
    """

    error: HarnessError | None = None


@dataclass(frozen=True)
class Job:
    """One run of an experiment.

    Attributes:
        experiment: module with `run(settings, directory, keeper)`.
        directory: of the run.
        logged: what it prints goes into `log.txt` there, instead of to this process's own output.
    """

    experiment: str
    settings: RunSettings
    directory: Path
    logged: bool = True


class Worker:
    """A process for the jobs of one pair, or several.

    Args:
        variables: environment variables of the process, set before it imports anything heavy.
        num_ranks: processes over which models are split.

    Attributes:
        loading: whether it is at work on loading the pair, or failed or died of it.
        error: what ended the last job in rank 0, if that was not the death of another.
    """

    def __init__(self, variables: Mapping[str, str], num_ranks: int = 1) -> None:
        # Under joblib the default start method is one that the new process, told of it, does not know.
        multiprocessing.set_start_method("spawn", force=True)
        # A forked process could not start CUDA, and a daemon does not keep a finished sweep waiting.
        context = multiprocessing.get_context("spawn")
        meeting = {} if num_ranks == 1 else _meeting_point(num_ranks)
        self._connections: list[Connection] = []
        self._processes: list[SpawnProcess] = []
        for rank in range(num_ranks):
            connection, theirs = context.Pipe()
            own = {**variables, **meeting, **({"RANK": str(rank), "LOCAL_RANK": str(rank)} if meeting else {})}
            process = context.Process(target=serve, args=(theirs, own), daemon=True)
            process.start()
            # With the only other copy in the process, its death is the end of the connection.
            theirs.close()
            self._connections.append(connection)
            self._processes.append(process)
        self.loading = False
        self.error: HarnessError | None = None

    def run(self, job: Job, timeout_s: float | None = None) -> str | None:
        """Run a job to its end, however it ends; its rows, if it wrote any, are in its directory.

        Returns:
            Why the process is gone; None where it lives and can take another job.
        """
        self.error = None
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            for connection in self._connections:
                # One that has died is found out below.
                with suppress(OSError):
                    connection.send(job)
            return self._watch(deadline, timeout_s)
        except KeyboardInterrupt:
            self._tell(signal.SIGINT)
            raise

    def close(self) -> None:
        """End the processes, and with them everything they hold on a GPU."""
        for connection in self._connections:
            connection.close()
        # Other ranks have nothing to write, and may wait for one that is gone.
        self._kill(self._processes[1:])
        self._processes[0].join(_GRACE_S)
        self._kill(self._processes)

    def _watch(self, deadline: float | None, timeout_s: float | None) -> str | None:
        """See `run`. The first trouble is the reason; what other ranks say after it follows from it."""
        at_work = dict(enumerate(self._connections))
        trouble: str | None = None
        died = False
        while at_work:
            rest = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready = wait(list(at_work.values()), rest)
            if not ready and trouble is None and 0 in at_work:
                return self._time_out(timeout_s)
            if not ready:
                break
            for rank, connection in list(at_work.items()):
                if connection not in ready:
                    continue
                try:
                    message = connection.recv()
                except (EOFError, OSError):
                    trouble, died = trouble or self._obituary(rank), True
                    if rank == 0:
                        self._kill(self._processes)
                        return trouble
                    message = Ended()
                if isinstance(message, Ended):
                    del at_work[rank]
                    if rank == 0:
                        self.error = None if died else message.error
                    elif message.error is not None:
                        trouble = trouble or f"rank {rank}: {message.error}"
                elif rank == 0:
                    self.loading = message
            if trouble or 0 not in at_work:
                soon = time.monotonic() + _RANKS_GRACE_S
                deadline = soon if deadline is None else min(deadline, soon)
        if at_work:
            self._kill(self._processes)
            return trouble or f"rank {min(at_work)} did not end when rank 0 had"
        return trouble if died else None

    def _kill(self, processes: Sequence[SpawnProcess]) -> None:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()

    def _tell(self, number: signal.Signals) -> bool:
        """Send a signal and wait until the job has ended of it; whether it did.

        Rank 0 alone is told: the others go on with it to the end of what it is at, where it stops.
        """
        process, connection = self._processes[0], self._connections[0]
        if process.pid is None or not process.is_alive():
            return True
        os.kill(process.pid, number)
        deadline = time.monotonic() + _GRACE_S
        with suppress(EOFError, OSError):
            while connection.poll(max(0.0, deadline - time.monotonic())):
                if isinstance(connection.recv(), Ended):
                    return True
        return not process.is_alive()

    def _time_out(self, timeout_s: float | None) -> str:
        ended = self._tell(signal.SIGTERM)
        self._kill(self._processes)
        reason = f"took longer than job_timeout_s={timeout_s:g}"
        return f"{reason} and was ended" if ended else f"{reason}, did not end when told to, and was killed"

    def _obituary(self, rank: int) -> str:
        process = self._processes[rank]
        process.join(_GRACE_S)
        its = "its process" if len(self._processes) == 1 else f"the process of rank {rank}"
        code = process.exitcode
        if code is None:
            process.kill()
            return f"{its} hung up"
        if code >= 0:
            return f"{its} ended with exit code {code}"
        memory = ""
        if -code == signal.SIGKILL:
            free = psutil.virtual_memory().available / 1e9
            memory = f" (by the kernel if main memory ran out: {free:.1f} GB are free now)"
        return f"{its} was killed by {signal.Signals(-code).name}{memory}"


def _meeting_point(num_ranks: int) -> dict[str, str]:
    """What ranks must know to find each other, as torchrun would tell them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def serve(connection: Connection, variables: Mapping[str, str]) -> None:
    """Run jobs as they come, with one pair kept loaded, until the other end hangs up. The target of the process."""
    # In a session of its own Ctrl-C reaches the sweep alone, which passes it on, once.
    os.setsid()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.update(variables)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.enable()

    from harness.experiments.setup import PairKeeper

    rank, keeper = int(variables.get("RANK", "0")), PairKeeper(connection.send)
    if rank:
        write_nothing()
    with suppress(EOFError, OSError, KeyboardInterrupt):
        while True:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            job: Job = connection.recv()
            connection.send(Ended(_assist(job, keeper, rank) if rank else _carry_out(job, keeper)))
    if "RANK" in variables:
        # A group of ranks is left as it stands: the others may be gone.
        os._exit(0)


def _assist(job: Job, keeper: object, rank: int) -> HarnessError | None:
    """The same job where rank 0 writes: what is written besides is lost, and what is printed but a traceback."""
    job.directory.mkdir(parents=True, exist_ok=True)
    file = job.directory / f"rank-{rank}.txt"
    _print_into(file)
    with tempfile.TemporaryDirectory(prefix="harness-rank-") as directory:
        error = _carry_out(dataclasses.replace(job, directory=Path(directory), logged=False), keeper)
    if notes := getattr(error, "__notes__", None):
        print(*notes, sep="\n", file=sys.stderr, flush=True)
    else:
        file.unlink(missing_ok=True)
    return error


def _print_into(file: Path) -> None:
    with file.open("ab") as log:
        # Below Python's own streams, so that what libraries print as they crash is kept as well.
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)


def _carry_out(job: Job, keeper: object) -> HarnessError | None:
    """Run the job, and give what ended it early."""
    job.directory.mkdir(parents=True, exist_ok=True)
    if job.logged:
        _print_into(job.directory / "log.txt")

    def time_out(signal_number: int, frame: FrameType | None) -> None:
        raise RunError(f"took longer than job_timeout_s={job.settings.job_timeout_s:g} and was ended")

    signal.signal(signal.SIGTERM, time_out)
    try:
        importlib.import_module(job.experiment).run(job.settings, job.directory, keeper)
        return None
    except HarnessError as error:
        if job.logged:
            print(f"harness: {error}", file=sys.stderr)
        return error
    except (Exception, KeyboardInterrupt) as exception:
        if job.logged:
            traceback.print_exc()
        first_line = (str(exception).strip().splitlines() or [""])[0]
        unknown = RunError(f"{type(exception).__name__}: {first_line} (HYDRA_FULL_ERROR=1 shows the traceback)")
        # Shown with the traceback of the error, in the process that raises it.
        unknown.add_note(traceback.format_exc())
        return unknown
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
