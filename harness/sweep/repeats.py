"""`repeats=5`: a run as a sweep of rounds, in which every job runs once, in a new process."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from harness.commands.latency.rows import LatencyRow
from harness.config.errors import SettingError
from harness.config.settings import require
from harness.records.registry import COMMANDS
from harness.results.schema import RunRow
from harness.results.statistics.stopping import SHARES
from harness.sweep.manifest import Manifest, append_summaries
from harness.tables.table import grouped

# A larger number is not made into a sweep: the settings refuse it.
MOST = 1000


def rounds(command: str, settings: Sequence[str], *, is_sweep: bool = False) -> list[str]:
    """Overrides that make a sweep of the rounds: `["repeat=1,2,3"]` for repeats=3, `["share=1,2,3,4"]` for race=true,
    [] for a single round.

    The first setting that varies varies slowest: every job runs once before any runs again, so
    that drift of the machine meets all jobs alike.

    Raises:
        SettingError: repeats or a race together with a search, a race with repeats, or a race without -m.
    """
    is_search = any(re.match(r"\+?(hydra/)?sweeper=", setting) for setting in settings)
    is_race = any(re.fullmatch(r"\+*race=true", setting, re.IGNORECASE) for setting in settings)
    matches = [re.fullmatch(r"\+*repeats=(\d+)", setting) for setting in settings]
    numbers = [int(match[1]) for match in matches if match]
    is_repeated = bool(numbers) and 1 < numbers[-1] <= MOST
    if not COMMANDS[command].repeats or not (is_repeated or is_race):
        return []
    if is_race:
        rule = "cannot be combined with a search or with repeats"
        require(not is_search and not is_repeated, "race", rule, True)
        require(is_sweep, "race", "needs -m and several jobs: harness latency -m K=2,4,8", True)
        return [f"share={','.join(map(str, range(1, SHARES + 1)))}"]
    if is_search:
        rule = "cannot be combined with a search, which chooses its own runs"
        raise SettingError("repeats", rule, numbers[-1])
    return [f"repeat={','.join(map(str, range(1, numbers[-1] + 1)))}"]


def pool(sweep: Path, rows: Sequence[RunRow]) -> list[list[LatencyRow]]:
    """Pool each job's rows over its rounds, and add the pooled rows to the sweep's file and to `results.file`.

    Jobs are numbered round by round. With draft=lookup,suffix and repeats=2 they are

        job 0   repeat=1 draft=lookup
        job 1   repeat=1 draft=suffix
        job 2   repeat=2 draft=lookup
        job 3   repeat=2 draft=suffix

    so that jobs 0 and 2 are pooled, and jobs 1 and 3.

    Args:
        rows: the rows of all jobs.

    Returns:
        [] where the sweep has no rounds, else the pooled rows, one list for each job of a round.
    """
    manifest = Manifest.read(sweep)
    latency_rows = [row for row in rows if isinstance(row, LatencyRow)]
    if manifest.num_rounds == 1 or not latency_rows:
        return []
    jobs_per_round = manifest.num_jobs // manifest.num_rounds
    runs = grouped(latency_rows, lambda row: int(row.job or 0))
    runs_of_job = grouped(runs, lambda number: number % jobs_per_round)
    # Statistics take a second to load, which --help and a mistake would wait for.
    from harness.commands.latency.pooling import pooled_rows

    pooled = []
    for numbers in runs_of_job.values():
        rows_of_job = pooled_rows([runs[number] for number in numbers])
        if not rows_of_job:
            continue
        pooled.append(rows_of_job)
    append_summaries(sweep, [row for rows_of_job in pooled for row in rows_of_job])
    return pooled
