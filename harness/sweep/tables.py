"""Prints a sweep: a line when a job ends, and tables when all have."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from rich.text import Text

from harness.commands.overview import failures_table
from harness.commands.read_runs import group, merge
from harness.commands.words import labels
from harness.engines.registry import is_elsewhere
from harness.records.registry import COMMANDS
from harness.results.schema import LEFT_OUT, NO_VERDICT, REFUSED
from harness.results.verdict import CANNOT_TELL
from harness.tables.table import Document, Line, grouped, without_empty
from harness.tables.terminal import WIDE, LastingConsole, plain_console, print_document

# Rows of any command, as its sweep's file holds them.
Rows = Sequence[Any]


def job_line(command: str, rows: Rows) -> str:
    """The result of a job, in a few words."""
    record = COMMANDS[command]
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
    pooled: Sequence[Rows] = (),
    raced: Document = (),
    *,
    is_refused: bool = False,
) -> None:
    """Print the final tables on stdout, and on stderr where the rows are.

    Args:
        is_refused: whether jobs have no rows because of a wrong setting.
        pooled: rows over all runs of each job that was repeated. The tables have them in place of
            the rows of single runs.
        raced: what came of a race, in place of the tables.
    """
    record = COMMANDS[command]
    if raced:
        print_document(raced, plain_console(WIDE))
    elif len(pooled) == 1:
        # One job, repeated: printed like a single run.
        print_document(record.pooled(pooled[0]), plain_console(WIDE))
    elif rows:
        all_rows = [*rows, *itertools.chain.from_iterable(pooled)]
        print_document(sweep_document(command, all_rows), plain_console(WIDE))

    done = {row.job for row in rows}
    line = f"{len(done)} of {num_jobs} jobs in {file}"
    # A command that measures nothing, such as `plan`, would fail again.
    is_unfinished = len(done) < num_jobs and not is_refused
    if is_unfinished or (_any_failed(rows) and record.measures):
        line += f"; {_how_to_go_on(rows)} measures what is missing or failed"
    console = LastingConsole(stderr=True, highlight=False, soft_wrap=True)
    console.print(Text(line, "dim"))


def _how_to_go_on(rows: Rows) -> str:
    """The command that measures the rest."""
    # Figures of a server that may be another one by now are reused only if the user says so.
    of_servers = [row for row in rows if is_elsewhere(row.engine)]
    if not of_servers or any(row.server_started for row in of_servers):
        return "the same command again"
    return "the same command with resume=always (the server does not tell when it was started)"


def sweep_document(command: str, rows: Rows) -> Document:
    """Each measurement once, then failures with their reasons."""
    record = COMMANDS[command]
    runs = group(rows)
    if not record.measures:
        return record.tables(runs)
    runs, failures = merge(runs)
    for run in runs:
        run.prompts = run.read_prompts()
    tables = [*record.tables(runs), failures_table(failures)]
    return without_empty(tables) or [Line("Nothing was measured.")]


def exit_code(command: str, rows: Rows) -> int:
    """1 if a job failed or has a bad answer, else 2 after a wrong setting, else 3 if one could not decide, else 0."""
    if _any_failed(rows):
        return 1
    if any(row.status == REFUSED for row in rows):
        return 2
    measured = [row for row in rows if row.status == "ok"]
    jobs = grouped(measured, attrgetter("job")).values()
    codes = {COMMANDS[command].exit_code(job) for job in jobs}
    codes |= {CANNOT_TELL for row in rows if row.status == NO_VERDICT}
    return min(codes - {0}, default=0)


def _any_failed(rows: Rows) -> bool:
    return any(row.status not in ("ok", NO_VERDICT, REFUSED, LEFT_OUT) for row in rows)
