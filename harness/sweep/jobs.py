"""One job of a sweep: reused if it was measured before, else run in a worker; it always gets a row."""

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
from harness.report.sweep import exit_code, job_line, print_sweep
from harness.results.files import read_rows, replace_rows, write_rows
from harness.results.measurement import measured_rows, measurement_digest
from harness.results.schema import RunRow
from harness.sweep import repeats
from harness.sweep.gpus import lease
from harness.sweep.manifest import Manifest
from harness.sweep.ranks import num_ranks
from harness.sweep.worker import Job, Worker, row_kind

# A worker that holds GPUs is ended when no job comes for this long: other jobs may wait for them.
_IDLE_S = 5.0


@dataclass
class _Crew:
    """The worker of this process, if it has one, what ends it when no job comes, and why pairs failed to load."""

    worker: Worker | None = None
    pair: str = ""
    idle: threading.Timer | None = None
    failures: dict[str, str] = field(default_factory=dict)

    def dismiss(self) -> None:
        """End the worker, and free its GPUs."""
        if self.worker is not None:
            self.worker.close()
        self.worker = None


_crew = _Crew()


def run_job(job: Job, measures: bool) -> Sequence[RunRow]:
    """The rows of a job, measured now or before; they are also put into the sweep's file.

    Args:
        measures: whether it runs in a worker, and is not repeated.

    Raises:
        SettingError: GPUs that are not there, or a place where no file can be written.
    """
    started, seconds = time.monotonic(), None
    rows: Sequence[RunRow] = []
    if measures and job.settings.resume and (file := job.settings.results.file) is not None:
        digest = measurement_digest(job.settings)
        rows = measured_rows(file, row_kind(job.command), digest)
        write_rows(job.file, rows)
    if not rows:
        rows = _measure(job) if measures else _run_quietly(job)
        seconds = time.monotonic() - started
    _record(job, rows, seconds)
    return rows


def run_on_ranks(job: Job, num_ranks: int) -> Sequence[RunRow]:
    """The rows of a single run by several processes. Rank 0 prints and writes; if it dies, this process writes.

    Raises:
        HarnessError: what ended the run; RunError if a process died.
    """
    worker = Worker(num_ranks)
    try:
        error = worker.run(job)
    finally:
        worker.close()
    if error is not None:
        job.rows_or_failure(str(error))
        raise error
    return job.rows()


def finish(command: str, directory: Path) -> tuple[Sequence[RunRow], int]:
    """End the sweep in a directory, which this process started: print its table, and return its rows and exit code."""
    _crew.dismiss()
    _crew.failures.clear()
    file = directory / f"{command}.csv"
    rows = read_rows(file, row_kind(command))
    manifest = Manifest.read(directory)
    num_jobs = manifest.num_jobs
    pooled = repeats.pool(rows, num_jobs, directory) if "repeat" in manifest.varying else []
    print_sweep(command, rows, file, num_jobs, pooled)
    # A job without a row had a wrong setting.
    missing = len({row.job for row in rows}) < num_jobs
    of_all_runs = [row for of_job in pooled for row in of_job]
    return [*rows, *of_all_runs], exit_code(command, rows) or (2 if missing else 0)


def _run_quietly(job: Job) -> Sequence[RunRow]:
    nowhere = io.StringIO()
    error: HarnessError | None = None
    with redirect_stdout(nowhere), redirect_stderr(nowhere):
        try:
            job.run()
        except HarnessError as known:
            error = known
    rows = job.rows()
    if error is not None and not rows:
        raise error
    return _with_error(rows, error)


def _with_error(rows: Sequence[RunRow], error: HarnessError | None) -> Sequence[RunRow]:
    """The rows of a run that an error ended after its measurement: it was not collected, so that the job failed.

    Those in the run's directory stay as they are.
    """
    measured = all(row.status == "ok" for row in rows)
    if error is None or isinstance(error, VerdictError) or not measured:
        return rows
    return [dataclasses.replace(row, status="failed", error=str(error)) for row in rows]


def _measure(job: Job) -> Sequence[RunRow]:
    pair, settings = repr(job.settings.pair), job.settings
    if reason := _crew.failures.get(pair):
        return job.rows_or_failure(f"not tried, because the pair failed to load before: {reason}")
    if _crew.idle is not None:
        # Afterwards it has ended the worker, or never will.
        _crew.idle.cancel()
        _crew.idle.join()
    if _crew.worker is None or _crew.pair != pair:
        _crew.dismiss()
        gpus = lease(settings.gpus_per_job)
        _crew.worker, _crew.pair = Worker(num_ranks(settings, len(gpus)), gpus), pair
    try:
        error = _crew.worker.run(job, settings.job_timeout_s)
    except KeyboardInterrupt:
        _crew.dismiss()
        if rows := job.rows():
            _record(job, rows, 0.0)
        raise
    rows = _with_error(job.rows_or_failure(str(error or "its process wrote no row")), error)
    failed = any(row.status != "ok" for row in rows)
    if failed and _crew.worker.loading:
        _crew.failures[pair] = str(rows[0].error)
    if failed or _crew.worker.spent:
        # A failure may have left something behind.
        _crew.dismiss()
    elif settings.gpus_per_job is not None:
        _crew.idle = threading.Timer(_IDLE_S, _crew.dismiss)
        _crew.idle.daemon = True
        _crew.idle.start()
    return rows


def _record(job: Job, rows: Sequence[RunRow], seconds: float | None) -> None:
    """Put a job's rows into the sweep's file, in place of any that it has there, and print a line about it.

    Args:
        seconds: that the job took; None if it was measured before.
    """
    assert job.sweep is not None
    file = job.sweep / f"{job.command}.csv"
    num_done = replace_rows(
        file, [dataclasses.replace(row, job=str(job.number)) for row in rows], "job"
    )
    manifest = Manifest.read(job.sweep)
    label = " ".join(
        given for given in job.overrides if given.lstrip("+").partition("=")[0] in manifest.varying
    )
    took = "measured before" if seconds is None else _duration(seconds)
    if num_left := max(0, manifest.num_jobs - num_done):
        each = (time.time() - manifest.started) / num_done
        took += f"; {num_left} left, about {_duration(num_left * each)}"
    # One write, so that lines of jobs side by side do not mix.
    said = ": ".join(filter(None, [label, job_line(job.command, rows)]))
    sys.stderr.write(f"[{num_done}/{manifest.num_jobs}] {said} ({took})\n")
    sys.stderr.flush()


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
