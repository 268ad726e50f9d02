"""One job of a sweep: rows from an earlier measurement, or else from a worker, however it ends."""

from __future__ import annotations

import dataclasses
import io
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.commands.latency.rows import PROMPTS_FILE
from harness.config.errors import (
    HarnessError,
    RunError,
    SettingError,
    UnreachableError,
    VerdictError,
)
from harness.config.run import RunSettings
from harness.engines.registry import pair_of
from harness.measuring.measurement import identify, measured_rows
from harness.measuring.progress import show
from harness.records.registry import COMMANDS
from harness.results.files import SUMMARY_FILE, read_rows, write_rows
from harness.results.schema import LEFT_OUT, NO_VERDICT, RunRow
from harness.sweep import repeats
from harness.sweep.gpus import lease
from harness.sweep.manifest import Manifest, SweepFile
from harness.sweep.ranks import num_ranks
from harness.sweep.tables import exit_code, job_line, print_sweep
from harness.sweep.worker import Job, Worker, row_kind
from harness.tables.table import Document

# A worker that holds GPUs is ended when no job comes for this long: other jobs may wait for them.
_IDLE_S = 5.0


@dataclass
class _Crew:
    """The worker of this process, if it has one.

    Attributes:
        held: all settings that decide which pair the worker loads and on how many GPUs, as text.
            The number of a repeat is among them, so that each repeat has a new process.
        idle: ends the worker when no job comes for a while; None for a worker without leased GPUs.
        failures: errors of pairs that failed to load, by pair, number of GPUs and limit of time.
    """

    worker: Worker | None = None
    held: str = ""
    idle: threading.Timer | None = None
    failures: dict[str, HarnessError] = field(default_factory=dict)

    def worker_for(self, settings: RunSettings) -> Worker:
        """The worker that holds the pair of these settings, or a new one."""
        # The job that follows keeps it busy.
        self._stop_timer()
        held = repr((pair_of(settings), settings.gpus_per_job))
        if self.worker is None or self.held != held:
            self._end_worker()
            gpus = lease(settings.gpus_per_job)
            self.worker = Worker(num_ranks(settings, len(gpus)), gpus)
            self.held = held
        return self.worker

    def dismiss(self) -> None:
        """End the worker, and free its GPUs."""
        self._stop_timer()
        self._end_worker()

    def dismiss_when_idle(self) -> None:
        """End the worker if no job comes soon."""
        self.idle = threading.Timer(_IDLE_S, self._end_worker)
        self.idle.daemon = True
        self.idle.start()

    def _stop_timer(self) -> None:
        """Stop the timer; if it is ending the worker already, wait until it has."""
        if self.idle is not None:
            self.idle.cancel()
            self.idle.join()
        self.idle = None

    def _end_worker(self) -> None:
        if self.worker is not None:
            self.worker.close()
        self.worker = None


_crew = _Crew()


def run_job(job: Job) -> Sequence[RunRow]:
    """The rows of a job, measured now or before; they are also put into the sweep's file.

    Raises:
        SettingError: GPUs that are not there, or a directory where no file can be written.
    """
    assert job.sweep is not None
    rows: Sequence[RunRow]
    # `map` has a share too, of the cells that it measures.
    share = getattr(job.settings, "share", None) if hasattr(job.settings, "race") else None
    if share is not None:
        # Statistics take a second to load, which only a race waits for.
        from harness.sweep import race

        reason = race.reason_to_leave(share, job.sweep, job.number)
        if reason is not None:
            rows = [race.row_left_out(job, reason)]
            _record(job, rows)
            return rows
    rows = _measured_before(job)
    if rows:
        write_rows(job.file, rows)
        _record(job, rows, "measured before")
        return rows
    started = time.monotonic()
    # A command that measures nothing, such as `plan`, loads nothing that could end the process.
    rows = _measure(job) if COMMANDS[job.command].measures else _run_quietly(job)
    _record(job, rows, _duration(time.monotonic() - started))
    return rows


def _measured_before(job: Job) -> Sequence[RunRow]:
    """The rows of an earlier identical measurement, if there is one and the job may reuse it.

    Rows with other figures than the file in their run's directory were edited, and are not reused.
    """
    settings: Any = job.settings
    file = settings.results.file
    if file is None or not settings.resume or not COMMANDS[job.command].measures:
        return []
    if settings.results.export:
        # Only a run itself writes the files for other tools.
        return []
    kind = row_kind(job.command)
    rows = measured_rows(file, kind, identify(settings))
    if not rows or rows[0].directory is None:
        return rows
    directory = Path(rows[0].directory)
    has_prompts = (directory / PROMPTS_FILE).is_file()
    if COMMANDS[job.command].repeats and settings.repeats > 1 and not has_prompts:
        # The interval over several runs needs the times of their prompts.
        return []
    original = [row for row in read_rows(directory / job.file.name, kind) if row.run == rows[0].run]
    figures = [column for column in kind.columns().items() if column[1].kind == "figure"]
    for row, unedited in zip(rows, original, strict=False):
        changed = [name for name, column in figures if column.of(row) != column.of(unedited)]
        if changed:
            differing = f"{file} has other figures ({', '.join(changed)}) than {directory}/"
            print(f"{differing}; measured again", file=sys.stderr)
            return []
    return rows


def run_on_ranks(job: Job, num_ranks: int) -> Sequence[RunRow]:
    """The rows of a single run by several processes.

    Rank 0 prints and writes; if it dies, this process writes.

    Raises:
        HarnessError: the error that ended the run; RunError if a process died.
    """
    worker = Worker(num_ranks)
    try:
        error = worker.run(job)
    finally:
        worker.close()
    if error is not None:
        if not isinstance(error, SettingError):
            job.ensure_rows(error)
        raise error
    return job.rows()


def finish(command: str, directory: Path, is_refused: bool) -> tuple[Sequence[RunRow], int]:
    """End this process's sweep: print its table, and return its rows and exit code.

    Args:
        is_refused: whether jobs have no rows because of a wrong setting.
    """
    _crew.dismiss()
    _crew.failures.clear()
    manifest = Manifest.read(directory)
    if not manifest.num_jobs:
        return [], 2
    file = SweepFile(directory, row_kind(command))
    rows = file.job_rows()
    pooled = repeats.pool(directory, rows)
    raced: Document = []
    if manifest.racers and rows:
        from harness.sweep import race

        rows_of_race, raced = race.finish(directory)
        pooled = [[row] for row in rows_of_race]
    print_sweep(
        command,
        rows,
        file.path,
        manifest.num_jobs,
        pooled,
        raced,
        is_refused=is_refused,
        summary=directory / SUMMARY_FILE,
        details=manifest.details,
    )
    # A job without a row had a wrong setting.
    missing = len({row.job for row in rows}) < manifest.num_jobs
    pooled_rows = [row for rows_of_job in pooled for row in rows_of_job]
    return [*rows, *pooled_rows], exit_code(command, rows) or (2 if missing else 0)


def _run_quietly(job: Job) -> Sequence[RunRow]:
    """Run the job in this process, without its output."""
    discarded = io.StringIO()
    error: HarnessError | None = None
    with redirect_stdout(discarded), redirect_stderr(discarded):
        try:
            job.run()
        except HarnessError as known:
            error = known
    rows = job.rows() if error is None else job.ensure_rows(error)
    return _with_error(rows, error)


def _with_error(rows: Sequence[RunRow], error: HarnessError | None) -> Sequence[RunRow]:
    """Mark complete rows as failed if the run raised an error after it had written them.

    So the sweep's file does not hold them as a measurement, although the file of the run does. A
    VerdictError is no failure: it is the result of a complete measurement.
    """
    is_complete = all(row.status == "ok" for row in rows)
    if error is None or isinstance(error, VerdictError) or not is_complete:
        return rows
    return [dataclasses.replace(row, status="failed", error=str(error)) for row in rows]


def _measure(job: Job) -> Sequence[RunRow]:
    """Run the job in the worker that has loaded its pair."""
    settings = job.settings
    # With more GPUs or more time it may load.
    attempt = repr((pair_of(settings), settings.gpus_per_job, settings.job_timeout_s))
    earlier = _crew.failures.get(attempt)
    if isinstance(earlier, SettingError):
        return job.ensure_rows(earlier)
    if earlier is not None:
        reason = f"not tried, because the pair failed to load before: {earlier}"
        return job.ensure_rows(RunError(reason))
    worker = _crew.worker_for(settings)
    started = time.monotonic()
    try:
        error = worker.run(job, settings.job_timeout_s)
    except KeyboardInterrupt:
        _crew.dismiss()
        rows = job.rows()
        if rows:
            _record(job, rows, _duration(time.monotonic() - started))
        raise
    rows = job.ensure_rows(error or RunError("its process wrote no row"))
    rows = _with_error(rows, error)
    failed = any(row.status not in ("ok", NO_VERDICT, LEFT_OUT) for row in rows)
    if error is not None and worker.loading and not isinstance(error, UnreachableError):
        _crew.failures[attempt] = error
    if failed or worker.has_ended:
        # A failure may have left something behind. A process also ends by itself after a good job,
        # where the capture of a CUDA graph failed in it.
        _crew.dismiss()
    elif settings.gpus_per_job is not None:
        _crew.dismiss_when_idle()
    return rows


def _record(job: Job, rows: Sequence[RunRow], note: str = "") -> None:
    """Put a job's rows into the sweep's file, and print a line about it.

    The line is such as `[3/12] draft=lookup: 1.31× (8.2 s; 9 left, about 75.0 s)`.

    Args:
        note: how long the job took, or that it was measured before.
    """
    assert job.sweep is not None
    file = SweepFile(job.sweep, row_kind(job.command))
    rows_of_sweep = file.put(job.number, rows)
    manifest = Manifest.read(job.sweep)
    num_ended = len({row.job for row in rows_of_sweep})
    label = " ".join(manifest.differing(job.overrides))
    label = label.replace("decoding.num_draft_tokens=", "K=")
    words = ": ".join(filter(None, [label, job_line(job.command, rows)]))
    notes = "; ".join(filter(None, [note, _remaining(manifest, rows_of_sweep)]))
    if notes:
        words += f" ({notes})"
    # The line about progress may still be on the terminal.
    show("")
    # One write, so that lines of jobs side by side do not mix.
    sys.stderr.write(f"[{num_ended}/{manifest.num_jobs}] {words}\n")
    sys.stderr.flush()


def _remaining(manifest: Manifest, rows_of_sweep: Sequence[RunRow]) -> str:
    """`9 left, about 75.0 s`, or nothing. The time is known once a job has been measured."""
    num_left = manifest.num_jobs - len({row.job for row in rows_of_sweep})
    if num_left <= 0:
        return ""
    num_measured = len({row.job for row in rows_of_sweep if manifest.has_measured(row)})
    if not num_measured:
        return f"{num_left} left"
    seconds_per_job = (time.time() - manifest.started) / num_measured
    return f"{num_left} left, about {_duration(num_left * seconds_per_job)}"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.1f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
