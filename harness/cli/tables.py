"""Prints a sweep: a line when a job ends, and tables when all have."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from harness.commands.pages import pages_about
from harness.commands.registry import measurement
from harness.config.amounts import counted
from harness.reporting.page import below_each_other, in_full, in_short
from harness.reporting.table import Document, Line
from harness.reporting.terminal import WIDE, as_text, plain_console, print_document, stderr_console
from harness.reporting.words import labels
from harness.results.files import SUMMARY_FILE
from harness.results.locked_files import replace_file
from harness.results.pooling import merge
from harness.results.result_file import NAME
from harness.results.runs import Run, group, grouped
from harness.results.schema import NO_VERDICT, REFUSED

# Rows of any command, as its sweep's file holds them.
Rows = Sequence[Any]


def job_line(command: str, rows: Rows) -> str:
    """The result of a job, in a few words."""
    record = measurement(command)
    failed = [row for row in rows if row.status != "ok"]
    if failed:
        return record.failure(failed[0])
    result = record.line(rows) if rows else ""
    if not result:
        return "done"
    return ", ".join([result, *labels(rows[-1])])


def print_sweep(
    command: str,
    rows: Rows,
    file: Path,
    num_jobs: int,
    pooled: Sequence[Rows],
    *,
    is_refused: bool,
    details: bool,
    as_json: bool,
) -> None:
    """Print the answer on stdout, and on stderr where the rows are. `summary.txt` gets the answer with all tables.

    Args:
        is_refused: whether jobs have no rows because of a wrong setting.
        pooled: rows over all runs of each job that was repeated. The tables have them in place of
            the rows of single runs.
        details: whether all tables are printed too.
        as_json: whether the `result.json` of each job is printed instead.
    """
    record = measurement(command)
    failures: Sequence[Run] = []
    if len(pooled) == 1:
        # One job, repeated: printed like a single run.
        runs = [Run(list(pooled[0]))]
    else:
        runs = group([*rows, *itertools.chain.from_iterable(pooled)])
        if record.measures:
            # Each measurement once, without the runs that a pooled row names.
            runs, failures = merge(runs)
    short, full = _answers(command, runs, failures)
    if as_json:
        # Of rows that were taken over that of their own run.
        for directory in dict.fromkeys(row.directory for row in rows):
            result = Path(directory or file.parent, NAME)
            if result.is_file():
                print(json.dumps(json.loads(result.read_text(encoding="utf-8"))))
    elif rows:
        print_document(full if details else short, plain_console(WIDE))

    done = {row.job for row in rows}
    line = f"  Saved  {len(done)} of {counted(num_jobs, 'job')} in {file}"
    is_unfinished = len(done) < num_jobs and not is_refused
    again = "the same command again"
    # Figures of a server that may be another one by now are reused only if the user says so. One row with its start
    # is enough: jobs that reached no server have none.
    server_rows = [row for row in rows if row.engine == "server"]
    if server_rows and not any(row.server_started for row in server_rows):
        why = "the server does not report when it was started"
        if any(getattr(row, "server_command", None) for row in server_rows):
            why = "files that the server's command does not name may have changed"
        again = f"the same command with resume=always ({why})"
    # A command that measures nothing, such as `plan`, would fail again.
    if is_unfinished or (_any_failed(rows) and record.measures):
        line += f"\n         {again} measures what is missing or failed"
    stderr_console().print(line, style="dim")
    if rows:
        # Last, because the disk may be full.
        replace_file(file.with_name(SUMMARY_FILE), as_text(full, WIDE).encode())


def _answers(
    command: str, runs: Sequence[Run], failures: Sequence[Run]
) -> tuple[Document, Document]:
    """The answer that a sweep prints, and the one in its `summary.txt`."""
    pages = pages_about([measurement(command)], runs, failures)
    if not pages:
        only = [Line("Nothing was measured.")]
        return only, only
    short = below_each_other(pages, in_short)
    full = below_each_other(pages, in_full)
    # What is swept needs no heading.
    return short[1:-1], full[1:-1]


def exit_code(command: str, rows: Rows, pooled: Sequence[Rows]) -> int:
    """1 if a job failed or has a bad answer, else 2 after a wrong setting, else 3 if one could not decide, else 0. Of
    times one answer is enough.

    Args:
        pooled: rows over all runs of each job that was repeated, which count in place of those of single runs.
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
