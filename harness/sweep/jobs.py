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

from harness.config.errors import HarnessError, VerdictError
from harness.config.run import RunSettings
from harness.menu.records import COMMANDS, pair_of
from harness.report.sweep import exit_code, job_line, print_sweep
from harness.results.files import read_rows, replace_rows, write_rows
from harness.results.measurement import identify, measured_rows
from harness.results.schema import RunRow
from harness.sweep import repeats, saturation
from harness.sweep.gpus import lease
from harness.sweep.manifest import Manifest
from harness.sweep.ranks import num_ranks
from harness.sweep.worker import Job, Worker, row_kind

# A worker that holds GPUs is ended when no job comes for this long: other jobs may wait for them.
_IDLE_S = 5.0


@dataclass
class _Crew:
    """The worker of this process, if it has one.

    Attributes:
        pair: the pair that the worker has loaded.
        idle: ends the worker when no job comes.
        failures: reasons why pairs failed to load, by pair.
    """

    worker: Worker | None = None
    pair: str = ""
    idle: threading.Timer | None = None
    failures: dict[str, str] = field(default_factory=dict)

    def worker_for(self, pair: str, settings: RunSettings) -> Worker:
        """The worker that has loaded this pair, or a new one; it does not end while idle now."""
        if self.idle is not None:
            # `join` waits for a timer that is already ending the worker.
            self.idle.cancel()
            self.idle.join()
        if self.worker is None or self.pair != pair:
            self.dismiss()
            gpus = lease(settings.gpus_per_job)
            self.worker = Worker(num_ranks(settings, len(gpus)), gpus)
            self.pair = pair
        return self.worker

    def dismiss(self) -> None:
        """End the worker, and free its GPUs."""
        if self.worker is not None:
            self.worker.close()
        self.worker = None

    def dismiss_when_idle(self) -> None:
        """End the worker if no job comes soon."""
        self.idle = threading.Timer(_IDLE_S, self.dismiss)
        self.idle.daemon = True
        self.idle.start()


_crew = _Crew()


def run_job(job: Job) -> Sequence[RunRow]:
    """The rows of a job, measured now or before; they are also put into the sweep's file.

    Raises:
        SettingError: GPUs that are not there, or a directory where no file can be written.
    """
    reason = saturation.reached_before(job.settings)
    if reason is not None:
        _leave_out(job, reason)
        return []
    rows = _measured_before(job)
    if rows:
        write_rows(job.file, rows)
        _record(job, rows, seconds=None)
    else:
        started = time.monotonic()
        rows = _measure(job) if _measures(job) else _run_quietly(job)
        _record(job, rows, time.monotonic() - started)
    saturation.note(job.settings, rows)
    return rows


def _leave_out(job: Job, reason: str) -> None:
    assert job.sweep is not None
    saturation.leave_out(job.directory, reason)
    rows_of_sweep = read_rows(job.sweep / job.file.name, row_kind(job.command))
    num_ended = _num_ended(job.sweep, rows_of_sweep)
    _say(job, f"left out, because {reason}", num_ended)


def _measures(job: Job) -> bool:
    """Whether the job's command measures, see `Command.measures`."""
    return COMMANDS[job.command].measures


def _measured_before(job: Job) -> Sequence[RunRow]:
    """The rows of an earlier identical measurement, if there is one and the job may reuse it."""
    file = job.settings.results.file
    if file is None or not job.settings.resume or not _measures(job):
        return []
    return measured_rows(file, row_kind(job.command), identify(job.settings))


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
        job.ensure_rows(str(error))
        raise error
    return job.rows()


def finish(command: str, directory: Path) -> tuple[Sequence[RunRow], int]:
    """End this process's sweep: print its table, and return its rows and exit code."""
    _crew.dismiss()
    _crew.failures.clear()
    kind = row_kind(command)
    file = directory / f"{kind.kind}.csv"
    manifest = Manifest.read(directory)
    if not manifest.num_jobs:
        return [], 2
    rows = read_rows(file, kind)
    num_jobs = manifest.num_jobs - saturation.num_left_out(directory)
    pooled = repeats.pool(rows, num_jobs, directory) if "repeat" in manifest.varying else []
    print_sweep(command, rows, file, num_jobs, pooled)
    # A job without a row had a wrong setting.
    missing = len({row.job for row in rows}) < num_jobs
    of_all_runs = [row for of_job in pooled for row in of_job]
    return [*rows, *of_all_runs], exit_code(command, rows) or (2 if missing else 0)


def _run_quietly(job: Job) -> Sequence[RunRow]:
    """Run the job in this process, without its output."""
    discarded = io.StringIO()
    error: HarnessError | None = None
    with redirect_stdout(discarded), redirect_stderr(discarded):
        try:
            job.run()
        except HarnessError as known:
            error = known
    rows = job.rows()
    if error is not None and not rows:
        raise error
    return _with_error(rows, error)


def _with_error(rows: Sequence[RunRow], error: HarnessError | None) -> Sequence[RunRow]:
    """Mark complete rows as failed if the run raised an error after it had written them.

    So the sweep's file does not hold them as a measurement, although the file of the run does. A
    VerdictError is no failure: it tells the result of a complete measurement.
    """
    is_complete = all(row.status == "ok" for row in rows)
    if error is None or isinstance(error, VerdictError) or not is_complete:
        return rows
    return [dataclasses.replace(row, status="failed", error=str(error)) for row in rows]


def _measure(job: Job) -> Sequence[RunRow]:
    """Run the job in a worker."""
    pair = repr(pair_of(job.settings))
    reason = _crew.failures.get(pair)
    if reason:
        return job.ensure_rows(f"not tried, because the pair failed to load before: {reason}")
    worker = _crew.worker_for(pair, job.settings)
    started = time.monotonic()
    try:
        error = worker.run(job, job.settings.job_timeout_s)
    except KeyboardInterrupt:
        _crew.dismiss()
        rows = job.rows()
        if rows:
            _record(job, rows, time.monotonic() - started)
        raise
    rows = _with_error(job.ensure_rows(str(error or "its process wrote no row")), error)
    failed = any(row.status != "ok" for row in rows)
    if failed and worker.loading:
        _crew.failures[pair] = str(rows[0].error)
    if failed or worker.has_ended:
        # A failure may have left something behind.
        _crew.dismiss()
    elif job.settings.gpus_per_job is not None:
        _crew.dismiss_when_idle()
    return rows


def _record(job: Job, rows: Sequence[RunRow], seconds: float | None) -> None:
    """Put a job's rows into the sweep's file, in place of any from before, and print a line.

    Args:
        seconds: duration of the job; None if it was measured before.
    """
    assert job.sweep is not None
    numbered = [dataclasses.replace(row, job=str(job.number)) for row in rows]
    rows_of_sweep = replace_rows(job.sweep / job.file.name, numbered)
    time_text = "measured before" if seconds is None else _duration(seconds)
    manifest = Manifest.read(job.sweep)
    num_ended = _num_ended(job.sweep, rows_of_sweep)
    num_left = max(0, manifest.num_jobs - num_ended)
    if num_left:
        time_text += f"; {num_left} left"
        num_measured = len({row.job for row in rows_of_sweep if manifest.has_measured(row)})
        if num_measured:
            seconds_per_job = (time.time() - manifest.started) / num_measured
            time_text += f", about {_duration(num_left * seconds_per_job)}"
    _say(job, f"{job_line(job.command, rows)} ({time_text})", num_ended)


def _num_ended(sweep: Path, rows_of_sweep: Sequence[RunRow]) -> int:
    """How many jobs of a sweep have ended: those with rows, and those that were left out."""
    return len({row.job for row in rows_of_sweep}) + saturation.num_left_out(sweep)


def _say(job: Job, text: str, num_ended: int) -> None:
    """Print a line about a job, with the number of jobs that have ended."""
    assert job.sweep is not None
    manifest = Manifest.read(job.sweep)
    words = ": ".join(filter(None, [_label(job, manifest), text]))
    # One write, so that lines of jobs side by side do not mix.
    sys.stderr.write(f"[{num_ended}/{manifest.num_jobs}] {words}\n")
    sys.stderr.flush()


def _label(job: Job, manifest: Manifest) -> str:
    """The typed settings in which this job differs from others."""
    overrides = []
    for override in job.overrides:
        key, _, _ = override.lstrip("+").partition("=")
        if key in manifest.varying:
            overrides.append(override)
    return " ".join(overrides)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.1f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
