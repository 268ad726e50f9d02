"""`repeats=5`: a run as a sweep of rounds, in each of which every job runs once, in a new process."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from harness.config.errors import SettingError
from harness.results.files import append_rows
from harness.results.pooling import pooled_rows
from harness.results.schema import LatencyRow, RunRow

# More rounds than anyone measures.
MOST = 1000


def rounds(command: str, arguments: Sequence[str]) -> list[str]:
    """Overrides that make a sweep of the rounds; [] for a single one.

    The first setting that varies varies slowest: every job runs once before any runs again, so
    that drift of the machine meets all jobs alike.

    Raises:
        SettingError: repeats of a search.
    """
    typed = [re.fullmatch(r"\+*repeats=(\d+)", argument) for argument in arguments]
    numbers = [int(match[1]) for match in typed if match]
    is_plain = not any(argument.startswith("-") for argument in arguments)
    if command != "latency" or not is_plain or not numbers or not 1 < numbers[-1] <= MOST:
        return []
    if any(re.match(r"\+?(hydra/)?sweeper=", argument) for argument in arguments):
        rule = "cannot be combined with a search, which chooses its own runs"
        raise SettingError("repeats", rule, numbers[-1])
    return [f"repeat={','.join(map(str, range(1, numbers[-1] + 1)))}"]


def pool(rows: Sequence[RunRow], num_jobs: int, directory: Path) -> list[list[LatencyRow]]:
    """Pooled rows of each job over its rounds, which are also written to the sweep's file and the collecting one.

    Args:
        rows: of all jobs of all rounds.
    """
    timed = [row for row in rows if isinstance(row, LatencyRow)]
    num_rounds = max((row.repeat for row in timed if isinstance(row.repeat, int)), default=1)
    by_job: dict[int, dict[int, list[LatencyRow]]] = {}
    for row in timed:
        number = int(row.job or 0)
        job = number % max(1, num_jobs // num_rounds)
        by_job.setdefault(job, {}).setdefault(number, []).append(row)
    pooled = [found for runs in by_job.values() if (found := pooled_rows(list(runs.values())))]
    for of_job in pooled:
        for file in (directory / "latency.csv", _collecting_file(directory)):
            if file is not None:
                append_rows(file, of_job)
    return pooled


def _collecting_file(directory: Path) -> Path | None:
    """`results.file` of a sweep's jobs."""
    for file in sorted(directory.glob("*/.hydra/config.yaml")):
        config: Any = OmegaConf.load(file)
        named = config.results.file
        return None if named is None else Path(named)
    return None
