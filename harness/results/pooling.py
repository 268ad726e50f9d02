"""Pools repetitions of a run, each in its own process, into one measurement.

With `repeats=5` a sweep ends with five runs, each of which has a regular and a speculative row. They become two rows
with `repeat=all`. Each figure of these is computed from all runs by the rule of its column, and the interval of the
speed-up is over prompts and runs. It needs the times of single prompts, which are read from the directories of the runs
(`latency_prompts.csv`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Sequence
from itertools import zip_longest
from operator import attrgetter
from statistics import fmean
from typing import Any

from harness.results.environment import new_run_id
from harness.results.prompt_times import common_times, pairs_by_unit, waits_by_unit
from harness.results.row import Pooling
from harness.results.rows.prompts import read_prompts
from harness.results.runs import Run, each_once
from harness.results.statistics.interval import FEWEST_EFFECTIVE, Coverage, Interval
from harness.results.statistics.runs import ratio_over_runs
from harness.results.verdict import AnyRow, judged

_RULES: dict[Pooling, Callable[[Sequence[Any]], Any]] = {
    "mean": fmean,
    "quadratic mean": lambda values: math.hypot(*values) / math.sqrt(len(values)),
    "sum": sum,
    "largest": max,
    "smallest": min,
    "all": all,
    "any": any,
}


def merge(runs: Sequence[Run]) -> tuple[list[Run], list[Run]]:
    """Each measurement once, and the failures that still count, both in the order of their run ids.

    A measurement is shown by all of its runs that succeeded, pooled as those of `repeats=` are, if the times of their
    prompts are known; otherwise by the newest run that succeeded; and if none did, by its newest run, provided that
    this has figures. A pooled row replaces the runs that it pools. A failure counts until a newer run of the same
    measurement succeeds:

        ok, failed, ok     the two successes are shown, and no failure
        ok, failed         the success is shown, and the failure counts

    Sets `times`, `parts` and, for pooled rows, `directory` of the given runs.
    """
    single = each_once(runs)
    by_id = {run.id: run for run in single}
    pooled: set[str] = set()
    for run in single:
        pooled_ids = getattr(run.last, "pooled_runs", None) or ()
        pooled.update(pooled_ids)
        if pooled_ids and run.directory is None and pooled_ids[0] in by_id:
            # A pooled row has no directory; the command and the machine are those of the runs that it pools.
            run.directory = by_id[pooled_ids[0]].directory
        run.parts = [by_id[part] for part in pooled_ids if part in by_id]
    by_measurement: dict[str, list[Run]] = {}
    for run in single:
        if run.id in pooled:
            continue
        measurement = run.last.measurement if run.last.is_repeatable else None
        by_measurement.setdefault(measurement or run.id, []).append(run)
    shown: list[Run] = []
    failures: list[Run] = []
    for repetitions in by_measurement.values():
        succeeded = [run for run in repetitions if run.status == "ok"]
        newest = succeeded[-1] if succeeded else repetitions[-1]
        newest.times = max(1, len(succeeded))
        if newest.has_figures:
            shown.append(_pooled_run(succeeded) or newest)
        failed = repetitions[repetitions.index(newest) + 1 :] if succeeded else repetitions
        if failed:
            failed[-1].times = len(failed)
            failures.append(failed[-1])
    return sorted(shown, key=attrgetter("id")), sorted(failures, key=attrgetter("id"))


def _pooled_run(runs: Sequence[Run[Any]]) -> Run[Any] | None:
    """Several runs of one measurement as one; None if they have no interval together."""
    has_speedup = len(runs) > 1 and all(len(run.rows) == 2 for run in runs)
    if not has_speedup or getattr(runs[-1].last, "speedup", None) is None:
        return None
    rows = pooled_rows([run.rows for run in runs])
    if not rows or rows[-1].speedup is None or not rows[-1].speedup.has_bounds:
        return None
    # The pooled row is in no file, so its id names the runs that it pools, the newest first: ids sort by time.
    ids = ", ".join(reversed(rows[-1].pooled_runs))
    rows = [dataclasses.replace(row, run=ids) for row in rows]
    return Run(rows, runs[-1].file, runs[-1].directory, len(runs), runs)


def pooled_rows(runs: Sequence[Sequence[AnyRow]]) -> list[AnyRow]:
    """One row per arm for several runs of the same settings, with an interval of the speed-up over units and runs.

    Args:
        runs: rows of each repetition, the regular arm first.

    Returns:
        One row per arm, in the order of the arms; [] if fewer than two runs succeeded.
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
        # Equal if the same runs are pooled again.
        "measurement": hashlib.sha256(measurements.encode()).hexdigest()[:16],
        "directory": None,
    }
    pooled = []
    # All runs have the same arms, because they have the same settings.
    for rows_of_arm in zip(*succeeded, strict=True):
        columns = _pooled_figures(rows_of_arm) | common
        row: Any = dataclasses.replace(rows_of_arm[0], **columns)
        rates = {name: rate for name, rate in row.drafts.columns().items() if rate is not None}
        pooled.append(dataclasses.replace(row, **rates))
    if len(pooled) > 1:
        pooled[-1] = dataclasses.replace(pooled[-1], **_speedup(succeeded))
    return judged(pooled)


def _pooled_figures(rows: Sequence[AnyRow]) -> dict[str, Any]:
    """The figures of an arm over its runs, by field, pooled by each column's rule; None if any run lacks the figure.

    Only the estimate of an interval is pooled: its bounds have no rule.
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
            weights = [getattr(row, column.per) for row in rows] if column.per else None
            columns[name] = _pooled(column.pools, values, weights)
        if column.pools == "none" or columns[name] == []:
            columns[name] = None
    return columns


def _pooled(rule: Pooling, values: Sequence[Any], weights: Sequence[Any] | None = None) -> Any:
    """One value for those of several runs; None for texts that differ, and if no value is known.

    Lists of different lengths are pooled place by place: [1, 2] and [3] have the mean [2, 2].

    Args:
        weights: of a mean; if the weight of a run is not known, all runs count alike.
    """
    known_values = [value for value in values if value is not None]
    if not known_values:
        return None
    if isinstance(known_values[0], Interval):
        return Interval(_pooled(rule, [value.estimate for value in known_values], weights))
    if rule == "none":
        return None
    if rule == "same":
        return known_values[0] if len(set(known_values)) == 1 else None
    is_weighted = weights is not None and all(weights)
    pooled = fmean(known_values, weights) if is_weighted else _RULES[rule](known_values)
    if rule == "mean" and isinstance(known_values[0], int):
        # A mean of whole numbers is rounded to one; a mean of truth values is what most runs have.
        return type(known_values[0])(round(pooled))
    return pooled


def _speedup(runs: Sequence[Sequence[AnyRow]]) -> dict[str, Any]:
    """The `speedup` of runs together, by name; without an interval if there are too few units, and empty if the rows of
    the runs' prompts are not found.
    """
    waits = []
    for row, *_ in runs:
        units = pairs_by_unit(read_prompts(row.directory, row.run))
        waits.append(waits_by_unit(units, row.is_batched))
    regular, speculative = common_times(waits)
    if not regular.size:
        return {}
    last = runs[0][-1]
    # The unit of the run's own interval.
    coverage = Coverage.of(last.speedup)
    unit_name = "prompt" if coverage is None else coverage.unit
    estimate = ratio_over_runs(regular, speculative, unit_name)
    covers = dataclasses.replace(
        coverage or estimate.covers,
        num_units=estimate.covers.num_units,
        num_runs=estimate.covers.num_runs,
        # `repeats=` gives each run another seed, so that sampled texts vary between runs, too.
        own_seeds=len({getattr(rows[-1], "seed", None) for rows in runs}) == len(runs),
    )
    estimate = dataclasses.replace(estimate, covers=covers)
    speedup = estimate.interval()
    if (covers.num_effective or FEWEST_EFFECTIVE) < FEWEST_EFFECTIVE:
        speedup = Interval(speedup.estimate, covers=covers)
    return {"speedup": speedup}
