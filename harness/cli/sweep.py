"""A sweep: gets rows for each job, from a worker or an earlier measurement, and prints the table at the end."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
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
from harness.config.errors import HarnessError, RunError, SettingError, UnreachableError
from harness.config.machine import share_cores
from harness.config.run import PromptedSettings, RepeatedSettings, RunSettings
from harness.engines.registry import engine_of, pair_key
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

# The rows of any command, as the file of its sweep holds them.
Rows = Sequence[Any]


def begin(
    command: str, config: DictConfig, loader: ConfigLoader
) -> tuple[Manifest, list[list[str]]]:
    """Write the manifest before the first job, and remove the rows of an earlier sweep from the directory.

    Returns:
        The manifest, and the overrides of each job.

    Raises:
        SettingError: there are no jobs, or too many.
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
    if launcher.endswith((".SlurmLauncher", ".RayLauncher")):
        # From now on, this process only waits for jobs that run elsewhere. A signal ends the wait, and the table is
        # printed.
        signals.raise_postponed()
    return manifest, jobs


class Crew:
    """Keeps the worker of this process's sweep from job to job, and remembers the pairs that failed to load."""

    def __init__(self) -> None:
        # Holds the last job's pair. None before the first job, and after a failure.
        self._worker: Worker | None = None
        # The text of all settings that decide which pair the worker loads. These include the number of a repeat, so
        # that each repeat gets a new process.
        self._pair = ""
        # The errors of pairs that failed to load, by pair and time limit, because a pair may load if it has more time.
        self._failures: dict[tuple[str, float | None], HarnessError] = {}

    def run(self, job: Job) -> HarnessError | None:
        """Run a job in the worker that has loaded its pair, or else in a new one.

        Returns:
            The error that ended the job early; None if there was none.
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

    Raises:
        SettingError: a setting is wrong, or no file can be written to the directory.
    """
    hydra = HydraConfig.get()
    directory = Path(hydra.runtime.cwd, hydra.sweep.dir)
    manifest = Manifest.read(directory)
    command, settings = settings_of(config, servers, manifest)
    check_machine(command, settings)
    number = int(hydra.job.num)
    signals.raise_postponed()
    # The jobs of submitit's `LocalLauncher` run at the same time on this machine, `max_batch_size` of them. Ray limits
    # the threads of its jobs itself, and Hydra's own launcher runs one job after the other.
    is_side_by_side = "LocalLauncher" in hydra.launcher._target_
    share_cores(hydra.sweeper.get("max_batch_size") or 1 if is_side_by_side else 1)
    label = manifest.label(hydra.overrides.task, settings.engine)
    output = Path(hydra.runtime.output_dir)
    job = Job(command.name, settings, output, f"[{number + 1}] {label}")
    file = SweepFile(directory, measurement(command.name).row)

    def record(rows: Rows, note: str) -> None:
        _print_line(manifest, file.put(number, rows), label, job_line(command.name, rows), note)

    rows = _measured_before(job)
    if rows:
        write_rows(job.file, rows)
        record(rows, "measured before")
        return rows
    started = time.monotonic()
    error: HarnessError | None = None
    doubt = ""
    with suppress(HarnessError):
        # The job's worker meets the same error and reports it as the failure of the job.
        _, doubt = _outlook(command, settings)
    if doubt or not sys.stderr.isatty():
        # On a terminal, the job's progress line says the same.
        about = ": ".join(filter(None, [label, doubt]))
        say(f"job {number + 1} of {manifest.num_jobs}: {about}")
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
        if not rows and isinstance(interrupt, signals.TimeLimit):
            rows = job.ensure_rows(RunError(str(interrupt)))
        if rows:
            record(rows, _duration(time.monotonic() - started))
        raise
    # If an error came after complete rows were written, these stay in the run's own file, and the sweep's file has them
    # marked as failed.
    if error is not None and all(row.status == "ok" for row in rows):
        rows = [dataclasses.replace(row, status="failed", error=str(error)) for row in rows]
    record(rows, _duration(time.monotonic() - started))
    return rows


def _measured_before(job: Job) -> Sequence[RunRow]:
    """Return the rows of an earlier identical measurement; empty if there is none, or if the job may not reuse it."""
    settings = job.settings
    record = measurement(job.command)
    if not settings.resume or not record.measures:
        return []
    # Without a file that collects all runs, an earlier start of this sweep may have left rows of the same job.
    file = settings.results.file or job.file
    rows = measured_rows(file, record.row, identify(settings))
    is_repeat = isinstance(settings, RepeatedSettings) and settings.repeats > 1
    if rows and is_repeat and not Path(rows[0].directory or "", PROMPTS_FILE).is_file():
        # The interval over several runs needs the times of their prompts, which are missing here.
        return []
    return rows


def _print_line(manifest: Manifest, ended: Rows, label: str, result: str, note: str) -> None:
    """Print a line about a job that has ended: `[3/12] draft=lookup: 1.31× (0:00:08)`.

    Args:
        ended: the rows of all jobs that have ended.
        note: how long the job took, or that it was measured before.
    """
    num_ended = len({row.job for row in ended})
    words = ": ".join(filter(None, [label, result]))
    say(f"[{num_ended}/{manifest.num_jobs}] {words} ({note})")


def _duration(seconds: float) -> str:
    """Return the time as hours, minutes and seconds: `0:01:15`."""
    return str(timedelta(seconds=round(seconds)))


def job_line(command: str, rows: Rows) -> str:
    """Return the result of a job in a few words, or the reason of its failure."""
    record = measurement(command)
    failed = [row for row in rows if row.status != "ok"]
    if failed:
        return record.failure(failed[0])
    result = record.line(rows) if rows else ""
    return ", ".join([result, *labels(rows[-1])]) if result else "done"


def finish(
    command: str, config: DictConfig, manifest: Manifest, *, is_refused: bool, is_interrupted: bool
) -> tuple[Sequence[RunRow], int]:
    """End this process's sweep: print its table, and return its rows and its exit code.

    Args:
        is_refused: whether jobs may lack rows because a setting was wrong.
        is_interrupted: whether jobs may lack rows because the sweep did not wait for them.
    """
    global _crew
    _crew.dismiss()
    _crew = Crew()
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

    With draft=lookup,tiny_draft and repeats=2 there are four jobs. Those of the first round have the numbers 0 and 1,
    and those of the second 2 and 3. So 0 and 2 are pooled, and 1 and 3.

    Args:
        rows: the rows of all jobs.

    Returns:
        The pooled rows: one list for each job of a round that succeeded at least twice. Empty without repeats.
    """
    if manifest.jobs_per_round == manifest.num_jobs:
        return []
    compared = [row for row in rows if isinstance(row, ComparedRow)]
    runs = grouped(compared, lambda row: int(row.job or 0))
    jobs = grouped(runs, lambda number: number % manifest.jobs_per_round)
    pooled = [pooled_rows([runs[number] for number in numbers]) for numbers in jobs.values()]
    return [*filter(None, pooled)]


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
    """Print the answer on stdout, and on stderr where the rows are saved. The answer with all tables goes to
    `summary.txt`.

    Args:
        pooled: for each job that was repeated, rows over all its runs. The tables show them instead of the single runs.
        is_refused: whether jobs lack rows because a setting was wrong.
        details: whether the tables after the answer are printed too.
        as_json: whether each job's `result.json` is printed instead of tables.
    """
    record = measurement(command)
    failures: Sequence[Run] = []
    if len(pooled) == 1:
        # A single job that was repeated is printed like a single run.
        runs = [Run(list(pooled[0]))]
    else:
        runs = runs_of([*rows, *itertools.chain.from_iterable(pooled)])
        if record.measures:
            # Show each measurement once, without the single runs that a pooled row names.
            runs, failures = merge(runs)
    pages = pages_about([record], runs, failures)
    num_done = len({row.job for row in rows})
    if num_done < num_jobs:
        # The next step is to repeat this command, or to correct a setting, instead of what the pages suggest.
        pages = {question: dataclasses.replace(page, next=()) for question, page in pages.items()}
    # The first line, which is the page's question, and the last, which is empty, are left out: the user knows the
    # question.
    short, full = (
        below_each_other(pages, part)[1:-1] if pages else [Line("Nothing was measured.")]
        for part in (in_short, in_full)
    )
    if as_json:
        # For rows that were taken over from an earlier run, this is the file of that run.
        for directory in dict.fromkeys(row.directory for row in rows):
            result = Path(directory or file.parent, NAME)
            if result.is_file():
                print(json.dumps(json.loads(result.read_text(encoding="utf-8"))))
    elif rows:
        print_document(full if details else short, plain_console(WIDE))

    line = f"  Saved  {num_done} of {counted(num_jobs, 'job')}{_unfinished(rows)} in {file}"
    # The figures of a server that may have been replaced since are only reused if the user says so. One row with the
    # server's start is enough, because the rows of jobs that did not reach the server have none.
    served = [row for row in rows if row.engine == "server"]
    is_unknown = bool(served) and not any(row.server_started for row in served)
    again = "the same command with resume=always" if is_unknown else "the same command again"
    is_unfinished = num_done < num_jobs and not is_refused
    # A command that measures nothing, such as `plan`, would fail in the same way again.
    if is_unfinished or (_any_failed(rows) and record.measures):
        line += f"\n         {again} measures what is missing or failed"
    say(line)
    if rows:
        # Written last, because it fails if the disk is full.
        replace_file(file.with_name(SUMMARY_FILE), as_text(full, WIDE).encode())


def exit_code(command: str, rows: Rows, pooled: Sequence[Rows]) -> int:
    """Return the exit code of a sweep. The order of the conditions counts.

    It is 1 if a job failed, or else 2 if a job was refused for a wrong setting. Otherwise the answers decide: 1 if one
    is bad, 3 if one is only doubtful, and 0 if all are good. For a command that compares times, a single good answer is
    enough for 0.

    Args:
        pooled: for each job that was repeated, rows over all its runs. They count instead of the single runs.
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
    return min((answer.exit_code for answer in bad_answers if answer is not None), default=0)


def _any_failed(rows: Rows) -> bool:
    return any(row.status not in ("ok", NO_VERDICT, REFUSED) for row in rows)


def _unfinished(rows: Rows) -> str:
    """` (7 measured, 1 interrupted)`, by the status of each job's last row; empty if all jobs were measured."""
    last = {row.job: row.status for row in rows}
    ended = Counter(
        "measured" if status in ("ok", NO_VERDICT) else status for status in last.values()
    )
    if not {*ended} - {"measured"}:
        return ""
    return f" ({', '.join(f'{number} {status}' for status, number in ended.items())})"


# Before a sweep -------------------------------------------------------------------------------------


def preview(config: DictConfig, loader: ConfigLoader, servers: Servers) -> str:
    """Return a description of what a run or a sweep would measure: each job in a line, and the commands of its servers.

    No launcher is asked, and no program, weights or GPU need to be on this machine.

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
    """Return what `Experiment.outlook` returns; two empty texts if the prompts are on a hub, or if nothing is run."""
    is_here = isinstance(settings, PromptedSettings) and settings.prompts.repository is None
    if not isinstance(command, Command) or not is_here:
        return "", ""
    return command.begin(settings).outlook()


def _server_lines(settings: RunSettings) -> list[tuple[str, str]]:
    """Return the labels of the servers that a run starts, each with its command."""
    if not vars(settings.engine).get("start_command"):
        return []
    commands = engine_of(settings).server_setup(settings).commands
    return [(label, shlex.join(words)) for label, words in commands.items()]
