"""`repeats=5`: a run as a sweep of rounds, in which every job runs once, in a new process."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from harness.config.errors import SettingError
from harness.menu.records import COMMANDS
from harness.results.files import append_rows
from harness.results.schema import LatencyRow, RunRow

# A limit beyond any reasonable number of rounds.
MOST = 1000

# Options of Hydra after which nothing is measured.
_PRINT_ALONE = {"-h", "--help", "--hydra-help", "-c", "--cfg", "-i", "--info", "-sc"}


def rounds(command: str, arguments: Sequence[str]) -> list[str]:
    """Overrides that make a sweep of the rounds; [] for a single one.

    The first setting that varies varies slowest: every job runs once before any runs again, so
    that drift of the machine meets all jobs alike.

    Raises:
        SettingError: repeats of a search.
    """
    typed = [re.fullmatch(r"\+*repeats=(\d+)", argument) for argument in arguments]
    numbers = [int(match[1]) for match in typed if match]
    is_plain = _PRINT_ALONE.isdisjoint(arguments)
    if not COMMANDS[command].repeats or not is_plain or not numbers or not 1 < numbers[-1] <= MOST:
        return []
    if any(re.match(r"\+?(hydra/)?sweeper=", argument) for argument in arguments):
        rule = "cannot be combined with a search, which chooses its own runs"
        raise SettingError("repeats", rule, numbers[-1])
    return [f"repeat={','.join(map(str, range(1, numbers[-1] + 1)))}"]


def pool(rows: Sequence[RunRow], num_jobs: int, directory: Path) -> list[list[LatencyRow]]:
    """Pool each job's rows over its rounds; the sweep's file and the cumulative one get them too.

    Args:
        rows: the rows of all jobs and rounds.
    """
    latency_rows = [row for row in rows if isinstance(row, LatencyRow)]
    repeats = [row.repeat for row in latency_rows if isinstance(row.repeat, int)]
    num_rounds = max(repeats, default=1)
    by_job: dict[int, dict[int, list[LatencyRow]]] = {}
    for row in latency_rows:
        number = int(row.job or 0)
        job = number % max(1, num_jobs // num_rounds)
        by_job.setdefault(job, {}).setdefault(number, []).append(row)
    # Statistics take a second to load, which --help and a mistake would wait for.
    from harness.results.pooling import pooled_rows

    pooled = []
    for runs in by_job.values():
        job_rows = pooled_rows(list(runs.values()))
        if not job_rows:
            continue
        pooled.append(job_rows)
        for file in (directory / f"{LatencyRow.kind}.csv", _cumulative_file(directory)):
            if file is not None:
                append_rows(file, job_rows)
    return pooled


def _cumulative_file(directory: Path) -> Path | None:
    """`results.file` of a sweep's jobs."""
    for file in sorted(directory.glob("*/.hydra/config.yaml")):
        config: Any = OmegaConf.load(file)
        name = config.results.file
        return None if name is None else Path(name)
    return None
