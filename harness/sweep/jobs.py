"""One job of a sweep: reused where it was measured before, else run in a worker, and a row however that ends."""

from __future__ import annotations

import atexit
import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.config.commands import RunSettings
from harness.config.errors import HarnessError
from harness.results.files import replace_rows, write_rows
from harness.results.measurement import measured_rows, measurement_digest, newest_run
from harness.results.sweep_report import job_line
from harness.sweep import ranks
from harness.sweep.gpus import Lease, lease
from harness.sweep.sweep import SWEEP_FILE
from harness.sweep.worker import Job, Worker

# A worker that holds GPUs others may be waiting for is ended when no job comes for so long.
_IDLE_S = 5.0


@dataclass(frozen=True)
class SweepJob:
    """Where a job stands in its sweep.

    Attributes:
        command: `latency` and the like; names the files.
        experiment: module with `run` and `record_failure`.
        number: among the sweep's jobs, from 0.
        overrides: the job's settings, as typed.
        directory: of the job.
        sweep_directory: of all of them.
    """

    command: str
    experiment: str
    number: int
    overrides: Sequence[str]
    directory: Path
    sweep_directory: Path


@dataclass
class _Crew:
    """The worker of this process, if one lives, and the pairs that failed to load."""

    worker: Worker | None = None
    pair: object = None
    lease: Lease = field(default_factory=lambda: Lease({}))
    failed_pairs: list[tuple[object, str]] = field(default_factory=list)
    busy: threading.Lock = field(default_factory=threading.Lock)
    idle: threading.Timer | None = None

    def dismiss(self) -> None:
        """End the worker and give its GPUs back."""
        if self.worker is not None:
            self.worker.close()
        self.worker, self.pair = None, None
        self.lease.release()


_crew = _Crew()


def run_job(job: SweepJob, settings: RunSettings) -> list[dict[str, str]]:
    """The rows of a job, measured now or before; they are also put into the sweep's file.

    Raises:
        SettingError: GPUs that are not there, or a place where no file can be written.
    """
    started = time.monotonic()
    measurement = measurement_digest(settings)
    rows = measured_rows(settings.results.file, measurement) if settings.resume else []
    if reused := bool(rows):
        write_rows(job.directory / f"{job.command}.csv", rows)
    else:
        with _crew.busy:
            rows = _measure(job, settings)
    record(job, rows, None if reused else time.monotonic() - started)
    return rows


def dismiss_crew() -> None:
    """The sweep is over: end its worker, and forget what failed."""
    _crew.dismiss()
    _crew.failed_pairs.clear()


def run_here(job: SweepJob, settings: RunSettings) -> list[dict[str, str]]:
    """The rows of a job that measures nothing and so runs in this process."""
    started = time.monotonic()
    with suppress(HarnessError), open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        importlib.import_module(job.experiment).run(settings, job.directory)
    rows = newest_run(job.directory / f"{job.command}.csv")
    record(job, rows, time.monotonic() - started)
    return rows


def record(job: SweepJob, rows: Sequence[dict[str, Any]], seconds: float | None) -> None:
    """Put a job's rows into the sweep's file, in the place of any it has there, and say so.

    Args:
        seconds: that the job took; None where it was measured before.
    """
    file = job.sweep_directory / f"{job.command}.csv"
    num_done = replace_rows(file, [{"job": str(job.number), **row} for row in rows], "job")
    sweep = json.loads((job.sweep_directory / SWEEP_FILE).read_text(encoding="utf-8"))
    label = " ".join(given for given in job.overrides if given.lstrip("+").partition("=")[0] in sweep["varying"])
    took = "measured before" if seconds is None else _duration(seconds)
    if num_left := max(0, sweep["num_jobs"] - num_done):
        each = (time.time() - sweep["started"]) / num_done
        took += f"; {num_left} left, about {_duration(num_left * each)}"
    # One write, so that lines of jobs side by side do not mix.
    sys.stderr.write(f"[{num_done}/{sweep['num_jobs']}] {label}: {job_line(job.command, rows)} ({took})\n")
    sys.stderr.flush()


def _measure(job: SweepJob, settings: RunSettings) -> list[dict[str, str]]:
    pair = settings.pair
    file = job.directory / f"{job.command}.csv"
    for failed, reason in _crew.failed_pairs:
        if failed == pair:
            return _fail(job, settings, f"not tried, because the pair failed to load before: {reason}")
    if _crew.idle is not None:
        _crew.idle.cancel()
    if _crew.worker is None or _crew.pair != pair:
        _crew.dismiss()
        _crew.lease = lease(settings.gpus_per_job)
        variables = _crew.lease.variables
        _crew.worker, _crew.pair = Worker(variables, ranks.num_ranks(settings, variables)), pair
        atexit.register(_crew.dismiss)
    worker = _crew.worker
    try:
        death = worker.run(Job(job.experiment, settings, job.directory), settings.job_timeout_s)
    except KeyboardInterrupt:
        _crew.dismiss()
        if rows := newest_run(file):
            record(job, rows, 0.0)
        raise
    rows = newest_run(file) or _fail(job, settings, death or "its process wrote no row")
    if any(row["status"] != "ok" for row in rows):
        # Whatever went wrong may have left something behind.
        if worker.loading:
            _crew.failed_pairs.append((pair, rows[0]["error"]))
        _crew.dismiss()
    elif death:
        _crew.dismiss()
    elif _crew.lease.variables:
        _crew.idle = threading.Timer(_IDLE_S, _dismiss_if_idle)
        _crew.idle.daemon = True
        _crew.idle.start()
    return rows


def _dismiss_if_idle() -> None:
    if _crew.busy.acquire(blocking=False):
        try:
            _crew.dismiss()
        finally:
            _crew.busy.release()


def _fail(job: SweepJob, settings: RunSettings, reason: str) -> list[dict[str, str]]:
    """Rows of a job whose process could not write them. Imports torch here, and touches no GPU."""
    importlib.import_module(job.experiment).record_failure(settings, job.directory, reason)
    return newest_run(job.directory / f"{job.command}.csv")


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
