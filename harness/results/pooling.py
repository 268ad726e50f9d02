"""Repetitions of a run, each in its own process, as one measurement.

With `repeats=5` a sweep ends with five runs, each of a regular and a speculative row. They become two rows with
`repeat=all`: figures are means over the runs, and the interval of the speed-up is over prompts and runs. For that the
times of single prompts are read from the runs' directories (`latency_prompts.csv`).
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from itertools import zip_longest
from statistics import fmean
from typing import Any

from harness.results.environment import new_run_id
from harness.results.prompt_times import common_times, waits_of_both_arms
from harness.results.row import Pooling
from harness.results.rows.prompts import read_prompts
from harness.results.statistics.interval import Coverage, Interval
from harness.results.statistics.runs import ratio_over_runs
from harness.results.verdict import AnyRow, judged

_RULES: dict[Pooling, Callable[[Sequence[Any]], Any]] = {
    "mean": fmean,
    "sum": sum,
    "largest": max,
    "smallest": min,
    "all": all,
    "any": any,
}


def pooled_rows(runs: Sequence[Sequence[AnyRow]]) -> list[AnyRow]:
    """One row per arm for several runs of the same settings: means, with an interval over units and runs.

    Args:
        runs: rows of each repetition, the regular arm first.

    Returns:
        [] where fewer than two runs succeeded.
    """
    succeeded = [rows for rows in runs if rows and all(row.status == "ok" for row in rows)]
    if len(succeeded) < 2:
        return []
    measurements = "|".join(sorted(str(rows[0].measurement) for rows in succeeded))
    common = {
        "run": new_run_id(),
        "job": None,
        "repeat": "all",
        "repeats": len(succeeded),
        "pooled_runs": [str(rows[0].run) for rows in succeeded],
        # Equal where the same runs were repeated.
        "measurement": hashlib.sha256(measurements.encode()).hexdigest()[:16],
        "directory": None,
    }
    pooled = []
    # All runs of one job have the same arms.
    for rows_of_arm in zip(*succeeded, strict=True):
        columns = _pooled_figures(rows_of_arm) | common
        pooled.append(dataclasses.replace(rows_of_arm[0], **columns))
    if len(pooled) > 1:
        pooled[-1] = dataclasses.replace(pooled[-1], **_speedup(succeeded))
    return judged(pooled)


def _pooled_figures(rows: Sequence[AnyRow]) -> dict[str, Any]:
    """The figures of an arm over its runs, by the rule of each field; None where a run lacks one.

    Of an interval the estimate has a rule, and its ends have none.
    """
    columns: dict[str, Any] = {}
    for column in rows[0].columns().values():
        name = column.field
        if column.kind != "figure" or column.part not in ("", "estimate"):
            continue
        assert column.pools is not None, name
        values = [getattr(row, name) for row in rows]
        if None in values:
            columns[name] = None
        elif column.type is list:
            columns[name] = [_pooled(column.pools, place) for place in zip_longest(*values)]
        else:
            columns[name] = _pooled(column.pools, values)
        if column.pools == "none" or columns[name] == []:
            columns[name] = None
    return columns


def _pooled(rule: Pooling, values: Sequence[Any]) -> Any:
    """One value for those of several runs; None for texts that differ, and for no value at all.

    Lists of runs differ in length: a place that a run lacks is left out.
    """
    known_values = [value for value in values if value is not None]
    if not known_values:
        return None
    if isinstance(known_values[0], Interval):
        return Interval(_pooled(rule, [value.estimate for value in known_values]))
    if rule == "none":
        return None
    if rule == "same":
        return known_values[0] if len(set(known_values)) == 1 else None
    pooled = _RULES[rule](known_values)
    return round(pooled) if rule == "mean" and isinstance(known_values[0], int) else pooled


def _speedup(runs: Sequence[Sequence[AnyRow]]) -> dict[str, Any]:
    """The figures of the speed-up; without an interval where the runs' prompts are not found."""
    times = [waits_of_both_arms(read_prompts(row.directory, row.run)) for row, *_ in runs]
    regular, speculative = common_times(times)
    if not regular.size:
        return {}
    last = runs[0][-1]
    # As the run's own interval has it.
    coverage = Coverage.of(last.speedup)
    unit_name = "prompt" if coverage is None else coverage.unit
    estimate = ratio_over_runs(regular, speculative, unit_name)
    covers = dataclasses.replace(
        estimate.covers,
        same_texts=coverage is not None and coverage.same_texts,
        # With each run the seed changes, so that what is drawn varies between runs too.
        own_seeds=bool(last.temperature),
    )
    speedup = dataclasses.replace(estimate.interval(), covers=covers)
    return {"speedup": speedup, "visible_difference": estimate.visible_difference}
