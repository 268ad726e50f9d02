"""Repetitions of a run of `latency`, in processes of their own, as one measurement.

With `repeats=5` a sweep ends with five runs, each of a regular and a speculative row. They become two rows with
`repeat=all`: figures are means over the runs, and the interval of the speed-up is over prompts and runs. For that the
times of single prompts are read from the runs' directories (`latency_prompts.csv`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from harness.results.coverage import Coverage
from harness.results.environment import new_run_id
from harness.results.files import read_latency_prompts
from harness.results.rows.latency import LatencyPromptRow, LatencyRow
from harness.results.statistics.power import reach_columns
from harness.results.statistics.runs import ratio_over_runs
from harness.results.verdict import judged

# How a pooled row sums up a figure of its runs: by the largest, the smallest, or whether it is true of
# all of them. Of other numbers it has the mean, and of other yes-or-no figures whether it is true of any.
_LARGEST = ("peak_memory_bytes", "longest_answer")
_SMALLEST = ("shortest_answer", "smallest_batch")
_OF_ALL = ("interleaved",)
# Ends of intervals within a run. Their means would be no interval over several runs.
_OF_ONE_RUN = (
    "tokens_per_second_low",
    "tokens_per_second_high",
    "tokens_per_second_per_user_low",
    "tokens_per_second_per_user_high",
)


class UnitTimes(NamedTuple):
    """Milliseconds per token of each arm by unit (prompt, batch or lap) of one run."""

    regular: Mapping[int, float]
    speculative: Mapping[int, float]


def pooled_rows(runs: Sequence[Sequence[LatencyRow]]) -> list[LatencyRow]:
    """One row per arm for several runs of the same settings: means, with an interval over units and runs.

    Args:
        runs: rows of each repetition, the regular arm first.

    Returns:
        [] where fewer than two runs succeeded.
    """
    succeeded = [rows for rows in runs if rows and all(row.status == "ok" for row in rows)]
    if len(succeeded) < 2:
        return []
    common = {
        "run": new_run_id(),
        "job": None,
        "repeat": "all",
        "repeats": len(succeeded),
        "pooled_runs": [str(rows[0].run) for rows in succeeded],
        "measurement": _digest(rows[0].measurement for rows in succeeded),
        "directory": None,
    }
    pooled = []
    for rows_of_arm in zip(*succeeded, strict=True):
        columns = _means(rows_of_arm) | common
        pooled.append(dataclasses.replace(rows_of_arm[0], **columns))
    if len(pooled) > 1:
        pooled[-1] = dataclasses.replace(pooled[-1], **_speedup(succeeded))
    return judged(pooled)


def _means(rows: Sequence[LatencyRow]) -> dict[str, Any]:
    """The figures of an arm over its runs; None where a run lacks one."""
    figures = [name for name, column in rows[0].columns().items() if column.kind == "figure"]
    columns: dict[str, Any] = {}
    for name in figures:
        values = [getattr(row, name) for row in rows]
        unknown = name in _OF_ONE_RUN or None in values
        columns[name] = None if unknown else _mean(name, values)
    return columns


def _mean(name: str, values: Sequence[Any]) -> Any:
    """What a pooled row has of a figure, whose values of each run are known; None for texts that differ."""
    if all(value == values[0] for value in values):
        return values[0]
    if isinstance(values[0], bool):
        return all(values) if name in _OF_ALL else any(values)
    if isinstance(values[0], str):
        return None
    if isinstance(values[0], list):
        return _mean_of_lists(values)
    if name in _LARGEST:
        return max(values)
    if name in _SMALLEST:
        return min(values)
    mean = fmean(values)
    return round(mean) if isinstance(values[0], int) else mean


def _mean_of_lists(lists: Sequence[list[Any]]) -> list[Any]:
    """Sums of counts and means of rates, by place; a place that a run lacks is left out of its mean."""
    pooled: list[Any] = []
    for values in itertools.zip_longest(*lists):
        known = [value for value in values if value is not None]
        if not known:
            pooled.append(None)
        elif all(isinstance(value, int) for value in known):
            pooled.append(sum(known))
        else:
            pooled.append(fmean(known))
    return pooled


def _speedup(runs: Sequence[Sequence[LatencyRow]]) -> dict[str, Any]:
    """The columns of the speed-up; without an interval where the runs' prompts are not found."""
    times = [_unit_times(rows) for rows in runs]
    common = set(times[0].regular)
    for of_run in times:
        common &= of_run.regular.keys() & of_run.speculative.keys()
    if not common:
        ends = ("speedup_low", "speedup_high", "decode_speedup_low", "decode_speedup_high")
        return dict.fromkeys((*ends, "speedup_covers"))
    units = sorted(common)
    regular = np.array([[of_run.regular[unit] for unit in units] for of_run in times])
    speculative = np.array([[of_run.speculative[unit] for unit in units] for of_run in times])
    last = runs[0][-1]
    estimate = ratio_over_runs(regular, speculative, _unit_name(last))
    columns: dict[str, Any] = estimate.interval().columns("speedup")
    # Prompts have no times of decoding alone: the mean over runs has no interval.
    columns |= {"decode_speedup_low": None, "decode_speedup_high": None}
    # With each run the seed changes, so that what is drawn varies between runs too.
    seeds = " with a seed each" if last.temperature else ""
    columns["speedup_covers"] = f"{estimate.covers}{seeds}"
    return columns | reach_columns(estimate)


def _unit_name(row: LatencyRow) -> str:
    """`prompt`, `batch` or `lap`, as the run's own interval has it."""
    coverage = Coverage.parse(row.speedup_covers)
    return "prompt" if coverage is None else coverage.unit


def _unit_times(rows: Sequence[LatencyRow]) -> UnitTimes:
    """Times of one run, from its prompts file; empty where that is gone."""
    directory = Path(rows[0].directory) if rows[0].directory else None
    arms: dict[str | None, list[LatencyPromptRow]] = {"regular": [], "speculative": []}
    for row in read_latency_prompts(directory, rows[0].run):
        if row.unit is not None and row.is_timed:
            arms.setdefault(row.arm, []).append(row)
    regular = arms["regular"]
    speculative = arms["speculative"]
    in_both = {row.prompt_index for row in regular} & {row.prompt_index for row in speculative}
    was_served = rows[-1].was_served
    return UnitTimes(
        _by_unit([row for row in regular if row.prompt_index in in_both], was_served),
        _by_unit([row for row in speculative if row.prompt_index in in_both], was_served),
    )


def _by_unit(prompts: Iterable[LatencyPromptRow], was_served: bool) -> dict[int, float]:
    """Milliseconds per token by unit: a sum over the requests of a lap, or the time of a batch's row."""
    members: dict[int, list[LatencyPromptRow]] = {}
    for row in prompts:
        members.setdefault(row.unit or 0, []).append(row)
    if was_served:
        return {unit: sum(row.ms_per_token for row in rows) for unit, rows in members.items()}
    times = {}
    for unit, rows in members.items():
        num_tokens = sum(row.num_tokens or 1 for row in rows)
        times[unit] = sum(row.time_ms or 0.0 for row in rows) / num_tokens
    return times


def _digest(measurements: Iterable[str | None]) -> str:
    """The `measurement` of a pooled row: equal where the same runs were repeated."""
    text = "|".join(sorted(map(str, measurements)))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
