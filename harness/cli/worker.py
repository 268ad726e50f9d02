"""Runs jobs in a separate process that may die, the *worker*, and controls the worker from the user's process.

Models may exhaust memory, crash inside a library, or hang, while they load or while they run. So models are loaded and
run in the worker, which runs job after job with the pair that it has loaded. The user's process runs the sweep, and
reads the files that the worker writes. The two processes exchange these messages:

    to the worker     a `Job`
                      an exception, which is raised in the worker and ends its job
    from the worker   `_SPENT`, if the worker can run no further job; it is sent just before the message that ends
                      the job
                      at the end of a job: None, or the error that ended the job early; after an error the worker exits
"""

from __future__ import annotations

import faulthandler
import math
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from queue import SimpleQueue
from typing import IO, TYPE_CHECKING, Any

from harness.cli import signals
from harness.commands.registry import measurement
from harness.config.errors import HarnessError, RunError, in_one_line
from harness.config.run import RunSettings
from harness.engines.door import SLOWEST_MODULE
from harness.engines.record import engine_of
from harness.measuring.progress import live_on, note
from harness.results.environment import new_run_id
from harness.results.files import read_rows
from harness.results.schema import RunRow

if TYPE_CHECKING:
    from harness.engines.keeper import PairKeeper

# How many seconds a worker may take to write its rows and exit, after an error was raised in it.
_GRACE_S = 20.0
# A worker sends this if its process can run no further job (`Engine.is_spent`).
_SPENT = "spent"
# How many seconds a worker may live after its connection was closed.
_ENDING_S = 10.0


@dataclass(frozen=True)
class Job:
    """One run of a command: a single run, or a job of a sweep.

    Attributes:
        command: the command's name, such as `latency`.
        settings: the run's settings.
        directory: the directory of the run's own files.
        label: names a job of a sweep in messages; empty for a single run.
        run_id: the value of the column `run` in all rows of the job, which distinguishes these from the rows of an
            earlier run in the same directory.
    """

    command: str
    settings: RunSettings
    directory: Path
    label: str = ""
    run_id: str = field(default_factory=new_run_id)

    @property
    def file(self) -> Path:
        """The run's own file of rows."""
        return self.directory / f"{measurement(self.command).row.kind}.csv"

    def run(self, keeper: PairKeeper | None = None) -> Sequence[RunRow]:
        """Run the job in this process, and return its rows.

        Args:
            keeper: keeps the loaded pair from job to job; None for a single job.

        Raises:
            HarnessError: the error that ended the job. Rows of what was measured before are written by then.
            KeyboardInterrupt: the job was interrupted; as above.
        """
        signals.load(measurement(self.command).module)
        if engine_of(self.settings).in_process:
            if SLOWEST_MODULE not in sys.modules:
                note("importing torch and transformers")
            # `signals.load` postpones signals, because an exception that a signal handler raises during this import
            # may abort the process.
            signals.load(SLOWEST_MODULE)
        run_module = signals.load("harness.commands.run", must_go_on=True)
        # `signals.finishing` postpones signals while rows are written.
        rows: Sequence[RunRow] = run_module.run_command(
            self.command,
            self.settings,
            self.directory,
            keeper,
            signals.finishing,
            run_id=self.run_id,
        )
        return rows

    def rows(self) -> Sequence[RunRow]:
        """Return the rows that the run has written; empty if it wrote none."""
        rows = read_rows(self.file, measurement(self.command).row)
        return [row for row in rows if row.run == self.run_id]

    def ensure_rows(self, error: HarnessError) -> Sequence[RunRow]:
        """Return the run's rows. If the run wrote none, first write rows that state this error, without loading models.

        Raises:
            SettingError or RunError: as `record_failure`; then there are no rows.
        """
        rows: Sequence[RunRow] = self.rows()
        if not rows:
            run_module = signals.load("harness.commands.run", must_go_on=True)
            rows = run_module.record_failure(
                self.command, self.settings, self.directory, error, run_id=self.run_id
            )
        return rows


class Worker:
    """Controls a process that runs jobs which share one pair.

    Attributes:
        is_spent: whether the process can run no further job.
    """

    def __init__(self) -> None:
        self.is_spent = False
        environment = {
            **os.environ,
            # `python -c` finds modules in other directories than this process does.
            "PYTHONPATH": os.pathsep.join(sys.path),
            "PYTHONIOENCODING": ":replace",  # for letters that stdout cannot encode, as in `main._prepare_streams`
        }
        self._connection, end_of_worker = Pipe()
        self._process = start_process(end_of_worker, environment)
        # From now on only the worker's process has this end open, so that its death closes the connection.
        end_of_worker.close()

    def run(self, job: Job) -> HarnessError | None:
        """Run a job to its end, or for as long as its `job_timeout_s`. Afterwards the rows that the job wrote, if any,
        are in its directory.

        Returns:
            The error that ended the job early, after which the process takes no more jobs; None if there was none.

        Raises:
            KeyboardInterrupt: this process was interrupted. The job was ended and the worker killed before.
        """
        timeout_s = job.settings.job_timeout_s
        deadline = time.monotonic() + (timeout_s or math.inf)
        try:
            # If the process has died, `_receive` reports why.
            with suppress(OSError):
                self._connection.send(job)
            while True:
                seconds_left = deadline - time.monotonic()
                if seconds_left <= 0:
                    error = RunError(f"took longer than job_timeout_s={timeout_s:g} and was ended")
                    self._end(error)
                    return error
                # `poll` accepts no infinite timeout, so an hour at a time.
                if not self._connection.poll(min(seconds_left, 3600)):
                    continue
                message = self._receive()
                if message != _SPENT:
                    return message
                self.is_spent = True
        except KeyboardInterrupt as interrupt:
            self._end(interrupt)
            raise

    def close(self) -> None:
        """Kill the process, which frees everything that it holds on a GPU."""
        self._process.kill()
        self._process.wait()

    def _end(self, error: BaseException) -> None:
        """Raise an error in the process, give it time to write its rows, and kill it."""
        try:
            with suppress(OSError, subprocess.TimeoutExpired):
                self._connection.send(error)
                self._process.wait(_GRACE_S)
        finally:
            self.close()

    def _receive(self) -> Any:
        """Return the process's next message; if the connection was closed, an error that says how the process ended."""
        with suppress(EOFError, OSError):
            return self._connection.recv()
        cause = "its process"
        try:
            code = self._process.wait(_ENDING_S)
        except subprocess.TimeoutExpired:
            cause += " closed its connection and went on"
        else:
            if code >= 0:
                cause += f" ended with exit code {code}"
            else:
                cause += f" was killed by {signal.Signals(-code).name}"
            if code == -signal.SIGKILL:
                cause += " (by the kernel if main memory ran out)"
        return RunError(cause)


def start_process(
    connection: Connection, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start a process that runs the jobs that arrive through the connection."""
    program = f"from harness.cli.worker import serve; serve({connection.fileno()})"
    # The process gets its own session, so that Ctrl-C reaches only the user's process, which passes it on once.
    return subprocess.Popen(
        [sys.executable, "-c", program],
        env=environment,
        pass_fds=[connection.fileno()],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )


def serve(file_descriptor: int) -> None:
    """The program of the worker: run jobs, with one pair kept loaded, until a job fails or the connection is closed.

    Never returns: it ends the process.
    """
    connection = Connection(file_descriptor)
    jobs: SimpleQueue[Job] = SimpleQueue()
    errors: list[BaseException] = []

    def receive() -> None:
        """Receive messages in a thread of its own: put jobs into the queue, and raise errors in the main thread."""
        try:
            while True:
                message = connection.recv()
                if isinstance(message, Job):
                    jobs.put(message)
                else:
                    errors.append(message)
                    os.kill(os.getpid(), signal.SIGTERM)
        except (EOFError, OSError):
            pass  # the user's process is gone, and nobody waits for results
        except Exception:
            traceback.print_exc()  # for example, the job's classes cannot be imported here
        os._exit(1)

    faulthandler.enable()
    # Slurm sends SIGUSR2 to all processes of a job. The user's process turns it into an error (`signals.TimeLimit`) and
    # sends this error to the worker, so the worker ignores the signal itself. Servers that the worker starts ignore the
    # signal, too, so that they answer until the run has ended.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    with suppress(OSError, KeyboardInterrupt, RunError):
        signals.handle(
            signal.SIGTERM, lambda: errors[0] if errors else KeyboardInterrupt("stopped by SIGTERM")
        )
        threading.Thread(target=receive, daemon=True).start()
        job = jobs.get()
        keeper_module = signals.load("harness.engines.keeper", must_go_on=True)
        keeper = keeper_module.PairKeeper()
        terminal = None
        if sys.stderr.isatty():
            # A copy of the descriptor, because `_run` redirects descriptor 2 to the job's log.
            terminal = os.fdopen(os.dup(2), "w", encoding="utf-8", errors="replace")
        while True:
            error = _run(job, keeper, terminal)
            if keeper.is_spent:
                connection.send(_SPENT)
            connection.send(error)
            if error is not None:
                break
            job = jobs.get()
    # `sys.exit` would wait for threads of libraries, which may themselves wait for a device that no longer answers.
    os._exit(0)


def _run(job: Job, keeper: PairKeeper, terminal: IO[str] | None) -> HarnessError | None:
    """Run the job, and return the error that ended it early, or None. All output goes to the job's `log.txt`.

    Args:
        keeper: holds the pair of the previous job, if there was one.
        terminal: shows the progress line; None if stderr is not a terminal.

    Raises:
        OSError: the log cannot be opened. The process then ends without a message.
        KeyboardInterrupt: the user's process was interrupted.
    """
    job.directory.mkdir(parents=True, exist_ok=True)
    if terminal is not None:
        live_on(terminal, f"{job.label}: ")
    with (job.directory / "log.txt").open("ab") as log:
        # Redirect the file descriptors, not Python's streams, so that the output of crashing libraries is logged too.
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    error: HarnessError | None = None
    try:
        job.run(keeper)
    except HarnessError as failure:
        error = failure
    except Exception as exception:
        error = RunError(in_one_line(exception))
        # The note travels with the error to the user's process, where it is shown below the traceback.
        error.add_note(traceback.format_exc())
    finally:
        # The log's disk may be full.
        with suppress(OSError):
            sys.stdout.flush()
            if error is not None:
                lines = [f"harness: {error}", *getattr(error, "__notes__", ())]
                print("\n".join(lines), file=sys.stderr, flush=True)
    return error
