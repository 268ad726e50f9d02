"""Runs the jobs of a sweep: gets the rows of each job, from a worker or from an earlier measurement, and prints the
tables at the end.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import os
import shlex
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from datetime import timedelta
from operator import attrgetter
from pathlib import Path
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from harness.cli import signals
from harness.cli.job import Servers, check_machine, require_files, settings_of
from harness.cli.manifest import Manifest, SweepFile, results_file
from harness.cli.worker import Job, Worker
from harness.commands.command import Command, ConfiguredCommand
from harness.commands.pages import pages_about
from harness.commands.registry import measurement
from harness.config.amounts import counted
from harness.config.errors import HarnessError, RunError
from harness.config.machine import SWEEP_THREADS, share_cores
from harness.config.run import PromptedSettings, RepeatedSettings, RunSettings
from harness.engines.record import engine_of, pair_key
from harness.measuring.measurement import identify, measured_rows
from harness.measuring.progress import say
from harness.reporting.page import below_each_other, in_full, in_short
from harness.reporting.table import Line
from harness.reporting.terminal import WIDE, as_text, plain_console, print_document
from harness.reporting.words import labels
from harness.results.files import SUMMARY_FILE, write_rows
from harness.results.locked_files import replace_file
from harness.results.pooling import merge, pooled_rows
from harness.results.result_file import NAME
from harness.results.rows.prompts import PROMPTS_FILE
from harness.results.runs import Run, grouped, runs_of
from harness.results.schema import NO_VERDICT, REFUSED, ComparedRow, RunRow

# Rows of any command.
Rows = Sequence[Any]


def begin(
    command: str, config: DictConfig, loader: ConfigLoader
) -> tuple[Manifest, list[list[str]]]:
    """Write the manifest before the first job, and remove the rows of an earlier sweep from the directory.

    Returns:
        The manifest, and the overrides of each job.

    Raises:
        SettingError: there are no jobs, or too many, or a name in them cannot be used; or the directory contains a
            sweep with other choices.
        RunError or OSError: a file cannot be written (`composing` explains an OSError).
        HydraException or OmegaConfBaseException: a job cannot be composed.
    """
    directory = Path(config.hydra.sweep.dir)
    manifest = Manifest.of(config, loader)
    jobs = [overrides for overrides, _ in manifest.jobs(config, loader)]
    manifest = dataclasses.replace(manifest, num_jobs=len(jobs))
    manifest.write(directory)
    OmegaConf.save(config, directory / "multirun.yaml")
    SweepFile(directory, measurement(command).row).remove_jobs()
    say(f"{counted(manifest.num_jobs, 'job')} in {directory}")
    launcher = config.hydra.launcher._target_
    is_side_by_side = launcher.endswith((".LocalLauncher", ".JoblibLauncher"))
    if len(jobs) > 1 and is_side_by_side and measurement(command).settings.COMPARES_TIMES:
        say(
            "jobs run at the same time on this machine and slow each other down, so times and speed-ups are not those"
            " of an idle machine: leave out the launcher to measure one job after the other"
        )
    if not launcher.endswith(".BasicLauncher"):
        # From now on, this process only waits for jobs in other processes, except with Hydra's own launcher. A signal
        # ends the wait, and the table is printed.
        signals.raise_postponed()
    return manifest, jobs


class Crew:
    """Keeps the worker from job to job of this process's sweep."""

    def __init__(self) -> None:
        # The process that has loaded the last job's pair. None before the first job, and after a failure.
        self._worker: Worker | None = None
        # `pair_key` of the loaded pair, as text. The key includes the number of a repeat, so that each repeat gets a
        # new process.
        self._pair = ""

    def run(self, job: Job) -> HarnessError | None:
        """Run a job in the present worker if it has loaded the job's pair, otherwise in a new worker.

        Returns:
            The error that ended the job early; None if there was none.
        """
        pair = repr(pair_key(job.settings))
        if self._worker is None or pair != self._pair:
            self.dismiss()
            self._worker = Worker()
            self._pair = pair
        worker = self._worker
        error = worker.run(job)
        if error is not None or worker.is_spent:
            # A failed job may have left its process in a bad state.
            self.dismiss()
        return error

    def dismiss(self) -> None:
        """End the worker, which frees its GPUs."""
        if self._worker is not None:
            self._worker.close()
        self._worker = None


_crew = Crew()


def run_job(config: Any, servers: Servers) -> Sequence[RunRow]:
    """Return the rows of the job that Hydra composed, measured now or earlier, and put them into the sweep's file.

    If the job fails, its rows contain the error, which is not raised.

    Raises:
        SettingError: a setting is wrong, something that the run needs is not installed, or `results.file` cannot be
            written.
        RunError: another file of rows cannot be written.
        KeyboardInterrupt: the job was interrupted. The rows that it had written by then are in the sweep's file.
    """
    hydra = HydraConfig.get()
    directory = Path(hydra.runtime.cwd, hydra.sweep.dir)
    manifest = Manifest.read(directory)
    command, settings = settings_of(config, servers, manifest)
    check_machine(command, settings)
    number = int(hydra.job.num)
    signals.raise_postponed()
    # The jobs of submitit's `LocalLauncher` run at the same time on this machine: at most `max_batch_size` of them, or
    # all. Ray and joblib limit the threads of their jobs themselves, and Hydra's own launcher runs one job after the
    # other.
    is_side_by_side = "LocalLauncher" in hydra.launcher._target_
    most = min(hydra.sweeper.get("max_batch_size") or manifest.num_jobs, manifest.num_jobs)
    share_cores(most if is_side_by_side else 1)
    label = manifest.label(hydra.overrides.task, settings.engine)
    output = Path(hydra.runtime.output_dir)
    job = Job(command.name, settings, output, f"[{number + 1}] {label}")
    file = SweepFile(directory, measurement(command.name).row)

    def put_rows(rows: Rows, note: str) -> None:
        """Put the job's rows into the sweep's file, and print a line: `[3/12] draft=lookup: 1.31× (0:00:08)`.

        Args:
            note: how long the job took, or that it was measured before.
        """
        # Later jobs compute with as many threads as the first one, so that their runs can be compared.
        if threads := getattr(rows[-1], "num_threads", None):
            os.environ.setdefault(SWEEP_THREADS, str(threads))
        ended = file.put(number, rows)
        num_ended = len({row.job for row in ended})
        words = ": ".join(filter(None, [label, job_line(command.name, rows)]))
        say(f"[{num_ended}/{manifest.num_jobs}] {words} ({note})")

    rows = _measured_before(job)
    if rows:
        write_rows(job.file, rows)
        put_rows(rows, "measured before")
        return rows
    started = time.monotonic()
    error: HarnessError | None = None
    doubt = ""
    with suppress(HarnessError):
        # The worker gets the same error when it runs the job, and reports it as the job's failure.
        _, doubt = _outlook(command, settings)
    if doubt or not sys.stderr.isatty():
        # On a terminal, the job's progress line has the same number and label.
        about = [f"job {number + 1} of {manifest.num_jobs}", label, doubt]
        say(": ".join(filter(None, about)))
    try:
        if command.measures:
            error = _crew.run(job)
        else:
            # A command such as `plan` needs no worker, because it loads nothing that could kill this process.
            with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
                try:
                    job.run()
                except HarnessError as failure:
                    error = failure
        rows = job.ensure_rows(error or RunError("its process wrote no row"))
    except KeyboardInterrupt as interrupt:
        rows = job.rows()
        # A job that the cluster's time limit ended before it wrote a row counts as failed; after Ctrl-C it has no row.
        if not rows and isinstance(interrupt, signals.TimeLimit):
            rows = job.ensure_rows(RunError(str(interrupt)))
        if rows:
            put_rows(rows, _duration(time.monotonic() - started))
        raise
    # If the job failed after it had written complete rows, its own file keeps these, and the sweep's file gets copies
    # that are marked as failed.
    if error is not None and all(row.status in ("ok", NO_VERDICT) for row in rows):
        rows = [dataclasses.replace(row, status="failed", error=str(error)) for row in rows]
    put_rows(rows, _duration(time.monotonic() - started))
    return rows


def _measured_before(job: Job) -> Sequence[RunRow]:
    """Return the rows of an earlier identical measurement; empty if there is none, or if the job may not reuse it."""
    settings = job.settings
    record = measurement(job.command)
    if not settings.resume or not record.measures:
        return []
    # Without a file that collects all runs, look for rows that an earlier start of this sweep left for the same job.
    file = settings.results.file or job.file
    rows = measured_rows(file, record.row, identify(settings))
    is_repeat = isinstance(settings, RepeatedSettings) and settings.repeats > 1
    if rows and is_repeat and not Path(rows[0].directory or "", PROMPTS_FILE).is_file():
        # The interval over several runs needs the times of their prompts, which are missing here. (Only `latency` has
        # repeated runs.)
        return []
    return rows


def _duration(seconds: float) -> str:
    """Return the time as hours, minutes and seconds: `0:01:15`."""
    return str(timedelta(seconds=round(seconds)))


def job_line(command: str, rows: Rows) -> str:
    """Return the result of a job in a few words, or the reason of its failure; `done` if there are no such words.

    Args:
        rows: the job's rows; may be empty.
    """
    record = measurement(command)
    failed = [row for row in rows if row.status != "ok"]
    if failed:
        return record.failure(failed[0])
    result = record.line(rows) if rows else ""
    return ", ".join([result, *labels(rows[-1])]) if result else "done"


def finish(
    command: str, config: DictConfig, manifest: Manifest, *, is_refused: bool, is_interrupted: bool
) -> tuple[Sequence[RunRow], int]:
    """End this process's sweep: print its tables, and return its rows and its exit code.

    Args:
        is_refused: whether jobs may lack rows because a setting was wrong.
        is_interrupted: whether jobs may lack rows because the sweep did not wait for them.

    Returns:
        All rows, pooled ones last; and the exit code of these rows (`exit_code`). If that code is 0 but jobs lack rows,
        2 is returned if a setting was wrong, and otherwise 1.

    Raises:
        SettingError or RunError: a file cannot be written.
    """
    _crew.dismiss()
    os.environ.pop(SWEEP_THREADS, None)
    directory = Path(config.hydra.sweep.dir)
    file = SweepFile(directory, measurement(command).row)
    rows = file.job_rows()
    pooled = pool(manifest, rows)
    pooled_of_all = [row for rows_of_job in pooled for row in rows_of_job]
    file.append_summaries(pooled_of_all, results_file(config))
    if rows or not is_refused:
        print_sweep(
            command,
            rows,
            file.path,
            manifest.num_jobs,
            pooled,
            is_refused=is_refused,
            details=config.results.details,
            as_json=config.results.format == "json",
        )
    num_missing = manifest.num_jobs - len({row.job for row in rows})
    messages = directory / ".submitit"
    if num_missing and messages.is_dir() and not is_interrupted:
        missing = counted(num_missing, "job")
        print(f"harness: {missing} wrote no row; see the messages in {messages}", file=sys.stderr)
    code = exit_code(command, rows, pooled)
    if num_missing and not code:
        code = 2 if is_refused else 1
    return [*rows, *pooled_of_all], code


def pool(manifest: Manifest, rows: Sequence[RunRow]) -> list[list[ComparedRow]]:
    """Pool the rows of each job over its rounds.

    With draft=lookup,tiny_draft and repeats=2 there are four jobs. The first round has the jobs 0 and 1, and the second
    round the jobs 2 and 3. So jobs 0 and 2 are pooled, and jobs 1 and 3.

    Args:
        rows: the rows of all jobs.

    Returns:
        A list of pooled rows for each combination of settings whose job succeeded in at least two rounds. Empty without
        repeats.
    """
    if manifest.jobs_per_round == manifest.num_jobs:
        return []
    runs = runs_of([row for row in rows if isinstance(row, ComparedRow)])
    jobs = grouped(runs, lambda run: int(run.last.job or 0) % manifest.jobs_per_round)
    return [*filter(None, map(pooled_rows, jobs.values()))]


def print_sweep(
    command: str,
    rows: Rows,
    file: Path,
    num_jobs: int,
    pooled: Sequence[Rows],
    *,
    is_refused: bool = False,
    details: bool = False,
    as_json: bool = False,
) -> None:
    """Print the answer on stdout, and on stderr a line with the file of the rows. Write the answer with all tables to
    `summary.txt`.

    Args:
        rows: the rows of all jobs that have ended.
        file: the file with these rows.
        pooled: for each job that was repeated, its pooled rows. The tables show them in place of the single runs.
        is_refused: whether jobs may lack rows because a setting was wrong.
        details: whether to print the tables after the answer, too.
        as_json: whether to print, in place of tables, the `result.json` of each run that the rows are from, if the file
            still exists.

    Raises:
        RunError: `summary.txt` cannot be written.
    """
    record = measurement(command)
    failures: Sequence[Run] = []
    runs = runs_of([*rows, *itertools.chain.from_iterable(pooled)])
    if record.measures:
        # Show each measurement once: leave out the single runs that a pooled row combines.
        runs, failures = merge(runs)
    pages = pages_about([record], runs, failures)
    num_done = len({row.job for row in rows})
    if num_done < num_jobs:
        # The user must first repeat this command or correct a setting, so leave out the steps that the pages suggest.
        pages = {question: dataclasses.replace(page, next=()) for question, page in pages.items()}
    # Make the pages in two lengths. Leave out the first line, which is the page's question (the user knows it), and the
    # last line, which is empty.
    short, full = (
        below_each_other(pages, show)[1:-1] if pages else [Line("Nothing was measured.")]
        for show in (in_short, in_full)
    )
    if as_json:
        # Rows that were reused name the directory of the earlier run, so its file is printed. Each file is loaded and
        # dumped again, to print it in one line.
        for directory in dict.fromkeys(row.directory for row in rows):
            result = Path(directory or file.parent, NAME)
            if result.is_file():
                print(json.dumps(json.loads(result.read_text(encoding="utf-8"))))
    elif rows:
        print_document(full if details else short, plain_console(WIDE))

    line = f"  Saved  {num_done} of {counted(num_jobs, 'job')}{_unfinished(rows)}"
    if rows:
        line += f" in {file}"
    # A server whose start is unknown may have been replaced since, so its figures are reused only with resume=always.
    # One row with the server's start is enough, because the rows of jobs that did not reach the server have none.
    starts = [row.server_started for row in rows if row.engine == "server"]
    again = "the same command again"
    if starts and not any(starts):
        again = "the same command with resume=always"
    is_unfinished = num_done < num_jobs and not is_refused
    # A failed job of a command that measures nothing, such as `plan`, would fail in the same way again.
    if is_unfinished or (_any_failed(rows) and record.measures):
        line += f"\n         {again} measures what is missing or failed"
    say(line)
    if rows:
        # Written last, because it fails if the disk is full.
        replace_file(file.with_name(SUMMARY_FILE), as_text(full, WIDE).encode())


def exit_code(command: str, rows: Rows, pooled: Sequence[Rows]) -> int:
    """Return the exit code that follows from the rows of a sweep; `finish` also considers jobs without rows.

    The first condition that applies decides:

        a job failed                                             1
        a job was refused for a wrong setting                    2
        the command compares times, and one answer is good       0
        an answer is bad                                         1
        an answer is doubtful                                    3
        all answers are good, or there are no rows               0

    Args:
        pooled: for each job that was repeated, its pooled rows. If there are any, only they are judged.
    """
    if _any_failed(rows):
        return 1
    if any(row.status == REFUSED for row in rows):
        return 2
    record = measurement(command)
    jobs = pooled or [*grouped(rows, attrgetter("job")).values()]
    bad_answers = [record.bad_answer(job) for job in jobs]
    if record.settings.COMPARES_TIMES and None in bad_answers:
        return 0
    # The smallest code, because a bad answer (1) decides before a doubtful one (3).
    return min((answer.exit_code for answer in bad_answers if answer is not None), default=0)


def _any_failed(rows: Rows) -> bool:
    """Whether a job failed, was interrupted or does not fit. One that was refused is not among them."""
    return any(row.status not in ("ok", NO_VERDICT, REFUSED) for row in rows)


def _unfinished(rows: Rows) -> str:
    """` (7 measured, 1 interrupted)`, by the status of each job's last row; empty if all jobs were measured."""
    last = {row.job: row.status for row in rows}
    ended = Counter(
        "measured" if status in ("ok", NO_VERDICT) else status for status in last.values()
    )
    if not {*ended} - {"measured"}:
        return ""
    counts = [f"{number} {status.replace('_', ' ')}" for status, number in ended.items()]
    return f" ({', '.join(counts)})"


# Before a sweep -------------------------------------------------------------------------------------


def preview(config: DictConfig, loader: ConfigLoader, servers: Servers) -> str:
    """Return a description of what a run or a sweep would measure: each job in a line, and the commands of its servers.

    No launcher is called, and this machine needs none of the programs, weights or GPUs.

    Raises:
        SettingError: a setting is wrong, or a file is missing.
    """
    jobs: list[Any] = [(config.hydra.overrides.task, config)]
    manifest = None
    if config.hydra.mode is RunMode.MULTIRUN:
        manifest = Manifest.of(config, loader)
        jobs = [*manifest.jobs(config, loader)]
    lines = []
    for number, (words, composed) in enumerate(jobs, start=1):
        HydraConfig.instance().set_config(composed)
        own = OmegaConf.masked_copy(composed, [key for key in composed if key != "hydra"])
        command, settings = settings_of(own, servers, manifest)
        require_files(settings)
        draft = settings.draft.name if settings.draft else "none"
        names = f"model={settings.model.name} draft={draft}"
        label = " ".join(words) if manifest is None else manifest.label(words, settings.engine)
        outlook = ", ".join(filter(None, _outlook(command, settings)))
        text = ": ".join(filter(None, [label or names, outlook]))
        lines.append(f"  [{number}/{len(jobs)}] {text}")
        lines += [f"      {arm}: {line}" for arm, line in _server_lines(settings)]
    lines.append(f"{counted(len(jobs), 'job')}. Nothing was measured.")
    return "\n".join(lines)


def _outlook(command: ConfiguredCommand[Any], settings: RunSettings) -> tuple[str, str]:
    """Return two texts of `Experiment.outlook`: what would be sent, such as `15 prompts`, and why this would give no
    verdict. Both are empty for prompts on a hub, which are not downloaded for this, and for a command without a prompt
    set, such as a service or `plan`.

    Raises:
        HarnessError: a setting is wrong, or the prompts cannot be read.
    """
    is_here = isinstance(settings, PromptedSettings) and settings.prompts.repository is None
    if not isinstance(command, Command) or not is_here:
        return "", ""
    return command.begin(settings).outlook()


def _server_lines(settings: RunSettings) -> list[tuple[str, str]]:
    """Return the labels of the servers that a run starts, each with its command."""
    # `start_command` is a setting of engine=server. Its class is in `servers`, which `cli` may not import.
    if not vars(settings.engine).get("start_command"):
        return []
    commands = engine_of(settings).server_setup(settings).commands
    return [(label, shlex.join(words)) for label, words in commands.items()]
