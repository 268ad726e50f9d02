"""Sweeps of several rounds, in each of which every job runs once: `repeats=5`.

With draft=lookup,tiny_draft and repeats=2 the jobs are

    job 0   repeat=1 draft=lookup
    job 1   repeat=1 draft=tiny_draft
    job 2   repeat=2 draft=lookup
    job 3   repeat=2 draft=tiny_draft

so that jobs 0 and 2 are pooled at the end, and jobs 1 and 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from harness.cli.manifest import Manifest, append_summaries
from harness.results.pooling import pooled_rows
from harness.results.runs import grouped
from harness.results.schema import ComparedRow, RunRow


def pool(sweep: Path, rows: Sequence[RunRow]) -> list[list[ComparedRow]]:
    """Pool the rows of each job over its rounds, and add the pooled rows to the sweep's file and to `results.file`.

    Args:
        rows: the rows of all jobs.

    Returns:
        The pooled rows, one list for each job of a round that succeeded at least twice.
    """
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
