"""Prints a sweep: a line when a job ends, and tables when all have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from rich.text import Text

from harness.report.accuracy import accuracy_table, merged_rows
from harness.report.distill import trained_table
from harness.report.latency import latency_document, speedup_bounds
from harness.report.methods import methods_tables
from harness.report.overview import failures_table
from harness.report.pair_tables import pairs_table
from harness.report.pairs import latency_pairs
from harness.report.plan import plan_document
from harness.report.recovery import recovery_table, summarise
from harness.report.runs import Run, group, merge
from harness.report.table import Document, Line, Table, grouped, times, without_empty
from harness.report.terminal import WIDE, LastingConsole, plain_console, print_document
from harness.report.words import labels

# Rows of any command, as its sweep's file holds them.
Rows = Sequence[Any]


def job_line(command: str, rows: Rows) -> str:
    """The result of a job, in a few words."""
    troubled = next((row for row in rows if row.status != "ok"), None)
    if troubled is not None and command == "plan" and troubled.status == "does_not_fit":
        return str(troubled.error).partition(": ")[2]
    if troubled is not None:
        return f"{troubled.status}: {troubled.error}"
    result = _LINES[command](rows) if rows else ""
    return ", ".join([result, *labels(rows[-1])]) if result else "done"


def print_sweep(
    command: str, rows: Rows, file: Path, num_jobs: int, pooled: Sequence[Rows] = ()
) -> None:
    """Print the final tables on stdout, and on stderr where the rows are.

    Args:
        pooled: rows over all runs of each job that was repeated.
    """
    if len(pooled) == 1:
        # One measurement, which happens to be a sweep.
        print_document(latency_document(pooled[0]), plain_console(WIDE))
    elif rows:
        everything = [*rows, *(row for of_job in pooled for row in of_job)]
        print_document(sweep_document(command, everything), plain_console(WIDE))
    num_done = len({row.job for row in rows})
    num_failed = len({row.job for row in rows if row.status != "ok"})
    unfinished = num_done < num_jobs or (num_failed and command != "plan")
    again = "; the same command again measures what is missing or failed" if unfinished else ""
    LastingConsole(stderr=True, highlight=False, soft_wrap=True).print(
        Text(f"{num_done} of {num_jobs} jobs in {file}{again}", "dim")
    )


def sweep_document(command: str, rows: Rows) -> Document:
    """Each measurement once, then failures with their reasons."""
    if command == "plan":
        return plan_document(rows)
    runs, failures = merge(group(rows))
    tables = [*_TABLES[command](runs), failures_table(failures)]
    return without_empty(tables) or [Line("Nothing was measured.")]


def exit_code(command: str, rows: Rows) -> int:
    """1 if a job failed or found a loss, else 3 if one could not decide, else 0."""
    if any(row.status != "ok" for row in rows):
        return 1
    jobs = grouped(rows, attrgetter("job")).values() if command == "recovery" else ()
    verdicts = {_verdict(job) for job in jobs}
    return 1 if "lossy" in verdicts else 3 if "undecided" in verdicts else 0


def _latency(rows: Rows) -> str:
    row = rows[-1]
    if row.ms_per_token is None:
        return ""
    if not row.speedup:
        return f"{row.ms_per_token:.2f} ms/token"
    bounds = speedup_bounds(row)
    return f"{times(row.speedup)} ({bounds})" if bounds else times(row.speedup)


def _accuracy(rows: Rows) -> str:
    return ", ".join(
        f"{row.arm} {row.accuracy:.1%}" for row in merged_rows(rows) if row.accuracy is not None
    )


def _verdict(rows: Rows) -> str:
    return summarise(rows).verdict


def _latency_tables(runs: Sequence[Run]) -> list[Table]:
    pairs = latency_pairs(runs)
    return [pairs_table(pairs), *methods_tables(pairs)]


# For each command that has sweeps: the line of a job, and the tables of all of them.
_LINES: dict[str, Callable[[Rows], str]] = {
    "latency": _latency,
    "eval": _accuracy,
    "recovery": _verdict,
    "distill": _latency,
    "plan": lambda rows: "fits",
}
_TABLES: dict[str, Callable[[Sequence[Run]], list[Table]]] = {
    "latency": _latency_tables,
    "eval": lambda runs: [accuracy_table(runs)],
    "recovery": lambda runs: [recovery_table(runs)],
    "distill": lambda runs: [trained_table([row for run in runs for row in run.rows])],
}
