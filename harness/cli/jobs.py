"""One job of a sweep: rows from an earlier measurement, or else from a worker, however it ends."""

from __future__ import annotations

import dataclasses
import io
import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from datetime import datetime, timedelta
from pathlib import Path

from harness.cli import signals
from harness.cli.manifest import Manifest, SweepFile, append_summaries
from harness.cli.tables import exit_code, job_line, print_sweep
from harness.cli.worker import Job, Worker
from harness.commands.registry import measurement
from harness.config.amounts import counted
from harness.config.errors import (
    HarnessError,
    RunError,
    SettingError,
    UnreachableError,
)
from harness.config.run import RepeatedSettings
from harness.engines.registry import pair_key
from harness.measuring.measurement import identify, measured_rows
from harness.measuring.progress import say, show
from harness.results.files import write_rows
from harness.results.rows.prompts import PROMPTS_FILE
from harness.results.runs import grouped
from harness.results.schema import ComparedRow, RunRow


class Crew:
    """The worker of this process's sweep, which is kept from job to job, and the pairs that failed to load."""

    def __init__(self) -> None:
        # With the last job's pair; None before the first job, and after a failure.
        self._worker: Worker | None = None
        # The text of all settings that decide which pair the worker loads. The number of a repeat is among them, so
        # that each repeat has a new process.
        self._pair = ""
        # Errors of pairs that failed to load, by pair and limit of time: with more time one may load.
        self._failures: dict[tuple[str, float | None], HarnessError] = {}

    def run(self, job: Job) -> HarnessError | None:
        """Run a job in the worker that has loaded its pair, or in a new one.

        Returns:
            The error that ended the job early; None otherwise.
        """
        settings = job.settings
        pair = repr(pair_key(settings))
        earlier = self._failures.get((pair, settings.job_timeout_s))
        if isinstance(earlier, SettingError):
            return earlier
        if earlier is not None:
            return RunError(f"not tried, because the pair failed to load before: {earlier}")
        if self._worker is None or pair != self._pair:
            self.dismiss()
            self._worker = Worker()
            self._pair = pair
        worker = self._worker
        error = worker.run(job, settings.job_timeout_s)
        if error is not None and worker.loading and not isinstance(error, UnreachableError):
            self._failures[pair, settings.job_timeout_s] = error
        if worker.has_ended or error is not None:
            # A failure may have left something behind.
            self.dismiss()
        return error

    def dismiss(self) -> None:
        """End the worker, and free its GPUs."""
        if self._worker is not None:
            self._worker.close()
        self._worker = None


_crew = Crew()


def run_job(job: Job) -> Sequence[RunRow]:
    """The rows of a job, measured now or before; they are also put into the sweep's file.

    Raises:
        SettingError: a directory where no file can be written.
    """
    rows = _measured_before(job)
    if rows:
        write_rows(job.file, rows)
        _record(job, rows, "measured before")
        return rows
    started = time.monotonic()
    error: HarnessError | None = None
    if not sys.stderr.isatty():
        # A terminal has the job's line about progress.
        assert job.sweep is not None
        manifest = Manifest.read(job.sweep)
        label = manifest.label(job.overrides, job.settings.engine)
        say(f"job {job.number + 1} of {manifest.num_jobs}: {label}")
    try:
        if measurement(job.command).measures:
            error = _crew.run(job)
        else:
            # Such as `plan`, which loads nothing that could end this process.
            with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
                try:
                    job.run()
                except HarnessError as failure:
                    error = failure
        rows = job.ensure_rows(error or RunError("its process wrote no row"))
    except KeyboardInterrupt as interrupt:
        rows = job.rows()
        if not rows and isinstance(interrupt, signals.TimeLimit):
            rows = job.ensure_rows(RunError(str(interrupt)))
        if rows:
            _record(job, rows, _duration(time.monotonic() - started))
        raise
    # Where an error came after complete rows were written, the run's own file keeps them, and the sweep's has them as
    # failed.
    if error is not None and all(row.status == "ok" for row in rows):
        rows = [dataclasses.replace(row, status="failed", error=str(error)) for row in rows]
    _record(job, rows, _duration(time.monotonic() - started))
    return rows


def _measured_before(job: Job) -> Sequence[RunRow]:
    """The rows of an earlier identical measurement, if there is one and the job may reuse it."""
    settings = job.settings
    command = measurement(job.command)
    if not settings.resume or not command.measures:
        return []
    # Without a file for all runs the same job of this sweep may have rows from an earlier start.
    file = settings.results.file or job.file
    rows = measured_rows(file, command.row, identify(settings))
    is_repeat = isinstance(settings, RepeatedSettings) and settings.repeats > 1
    if rows and is_repeat and not Path(rows[0].directory or "", PROMPTS_FILE).is_file():
        # The interval over several runs needs the times of their prompts.
        return []
    return rows


def finish(
    command: str, directory: Path, *, is_refused: bool, is_interrupted: bool
) -> tuple[Sequence[RunRow], int]:
    """End this process's sweep: print its table, and return its rows and exit code.

    Args:
        is_refused: whether jobs have no rows because of a wrong setting.
        is_interrupted: whether jobs may have no rows because they were not waited for.
    """
    global _crew
    _crew.dismiss()
    _crew = Crew()
    manifest = Manifest.read(directory)
    if not manifest.num_jobs:
        return [], 2
    file = SweepFile(directory, measurement(command).row)
    rows = file.job_rows()
    pooled: list[list[ComparedRow]] = []
    if manifest.is_repeated and rows:
        pooled = pool(directory, rows)
    print_sweep(
        command,
        rows,
        file.path,
        manifest.num_jobs,
        pooled,
        is_refused=is_refused,
        details=manifest.details,
        as_json=manifest.format == "json",
    )
    num_missing = manifest.num_jobs - len({row.job for row in rows})
    messages = directory / ".submitit"
    if num_missing and messages.is_dir() and not is_interrupted:
        missing = counted(num_missing, "job")
        print(f"harness: {missing} wrote no row; see the messages in {messages}", file=sys.stderr)
    code = exit_code(command, rows, pooled)
    if num_missing and not code:
        code = 2 if is_refused else 1
    pooled_rows = [row for rows_of_job in pooled for row in rows_of_job]
    return [*rows, *pooled_rows], code


def pool(sweep: Path, rows: Sequence[RunRow]) -> list[list[ComparedRow]]:
    """Pool the rows of each job over its rounds, and add the pooled rows to the sweep's file and to `results.file`.

    With draft=lookup,tiny_draft and repeats=2 there are four jobs: the first round's have numbers 0 and 1, the second
    round's 2 and 3. So 0 and 2 are pooled, and 1 and 3.

    Args:
        rows: the rows of all jobs.

    Returns:
        The pooled rows, one list for each job of a round that succeeded at least twice.
    """
    # Statistics take a second to load, which only such a sweep waits for.
    from harness.results.pooling import pooled_rows

    jobs_per_round = Manifest.read(sweep).jobs_per_round
    compared = [row for row in rows if isinstance(row, ComparedRow)]
    runs = grouped(compared, lambda row: int(row.job or 0))
    pooled = []
    for numbers in grouped(runs, lambda number: number % jobs_per_round).values():
        rows_of_job = pooled_rows([runs[number] for number in numbers])
        if rows_of_job:
            pooled.append(rows_of_job)
    append_summaries(sweep, [row for rows_of_job in pooled for row in rows_of_job])
    return pooled


def _record(job: Job, rows: Sequence[RunRow], note: str) -> None:
    """Put a job's rows into the sweep's file, and print a line about it.

    The line is such as `[3/12] draft=lookup: 1.31× (0:00:08; 9 left, about 0:01:15)`.

    Args:
        note: how long the job took, or that it was measured before.
    """
    assert job.sweep is not None
    rows_of_sweep = SweepFile(job.sweep, measurement(job.command).row).put(job.number, rows)
    manifest = Manifest.read(job.sweep)
    num_ended = len({row.job for row in rows_of_sweep})
    num_left = manifest.num_jobs - num_ended
    notes = [note]
    if num_left > 0:
        began = datetime.fromtimestamp(manifest.started).astimezone()
        measured_here = {
            row.job
            for row in rows_of_sweep
            if row.timestamp and datetime.fromisoformat(row.timestamp) >= began
        }
        notes.append(f"{num_left} left")
        if measured_here:
            seconds_per_job = (time.time() - manifest.started) / len(measured_here)
            notes[-1] += f", about {_duration(num_left * seconds_per_job)}"
    label = manifest.label(job.overrides, job.settings.engine)
    words = ": ".join(filter(None, [label, job_line(job.command, rows)]))
    # The line about progress may still be on the terminal.
    show("")
    # One write, so that lines of jobs side by side do not mix.
    sys.stderr.write(f"[{num_ended}/{manifest.num_jobs}] {words} ({'; '.join(notes)})\n")
    sys.stderr.flush()


def _duration(seconds: float) -> str:
    """Hours, minutes and seconds: `0:01:15`."""
    return str(timedelta(seconds=round(seconds)))
