"""Pools repetitions of a run, each of which ran in its own process, into one measurement.

With `repeats=5`, a setting is measured by five runs, each of which writes a regular and a speculative row. They are
pooled into two rows with `repeat=all`. Each figure of these rows is computed from all runs by the rule of its column.
The interval of the speed-up is over prompts and runs. For this, the times of single prompts are read from the runs'
directories (`latency_prompts.csv`).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import zip_longest
from operator import attrgetter
from statistics import fmean
from typing import Any

from harness.results.prompt_times import common_times, pairs_by_unit, waits_by_unit
from harness.results.row import Pooling
from harness.results.runs import Run, each_once, grouped
from harness.results.schema import ComparedRow
from harness.results.statistics.interval import FEWEST_EFFECTIVE, Coverage, Interval
from harness.results.statistics.runs import ratio_over_runs
from harness.results.verdict import AnyRow, judged

# How known values are pooled. (`_pooled` has the rule `same`; columns with the rule `none` are not pooled.)
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
    """Select one run for each measurement, and the failures that still count; both are in the order of run ids.

    The run for a measurement is the newest run that succeeded, or without one the newest run, if it has figures. In the
    place of the newest that succeeded, all of them are shown, pooled like those of `repeats=`, if their speed-up then
    has an interval or they have a single arm (`_pooled_run`). Of pooled rows, only the newest is shown. If runs of
    `latency` have different numbers of threads on the CPU, one is selected for each number.

    A pooled row that was read from a file replaces the runs that it pools, and rows that pool fewer of them. A failure
    is a run with any status except `ok`. It counts until a newer run of the same measurement succeeds. Failures with
    the same reason are counted together (`times`):

        ok, failed, ok     the two successes are shown, and no failure
        ok, failed         the success is shown, and the failure counts

    The function sets `times`, `parts` and, for pooled rows, `directory` of the given runs.
    """
    single = each_once(runs)
    by_id = {run.id: run for run in single}
    pools = [getattr(run.last, "pooled_runs", None) or [] for run in single]
    for run, pooled_ids in zip(single, pools, strict=True):
        if pooled_ids and run.directory is None and pooled_ids[0] in by_id:
            # A pooled row has no directory. The runs that it pools have the same command and machine, so their
            # directory is used.
            run.directory = by_id[pooled_ids[0]].directory
        run.parts = [by_id[part] for part in pooled_ids if part in by_id]
    several = [{*pooled_ids} for pooled_ids in pools if pooled_ids]
    by_measurement: dict[str, list[Run]] = {}
    for run, pooled_ids in zip(single, pools, strict=True):
        # Leave out every run, and every pooled row of fewer runs, that a larger pooled row contains.
        own = {*(pooled_ids or [run.id])}
        if any(own < more for more in several):
            continue
        measurement = run.last.measurement if run.last.is_repeatable else None
        by_measurement.setdefault(measurement or run.id, []).append(run)
    shown: list[Run] = []
    failures: list[Run] = []
    for repetitions in by_measurement.values():
        succeeded = [run for run in repetitions if run.status == "ok"]
        for alike in [*grouped(succeeded, _threads).values()] or [repetitions[-1:]]:
            newest = alike[-1]
            newest.times = len(alike)
            if newest.has_figures:
                shown.append(_pooled_run(alike) or newest)
        failed = repetitions
        if succeeded:
            failed = repetitions[repetitions.index(succeeded[-1]) + 1 :]
        for alike in grouped(failed, attrgetter("reason")).values():
            alike[-1].times = len(alike)
            failures.append(alike[-1])
    return sorted(shown, key=attrgetter("id")), sorted(failures, key=attrgetter("id"))


def _threads(run: Run) -> int | None:
    """The number of threads that a run's times depend on; None if the run compares no times."""
    return run.last.num_threads if isinstance(run.last, ComparedRow) else None


def _pooled_run(runs: Sequence[Run[Any]]) -> Run[Any] | None:
    """Pool several runs of one measurement into one run; None if fewer than two can be pooled, or if they have two arms
    and the pooled speed-up has no interval.
    """
    has_same_arms = len({len(run.rows) for run in runs}) == 1
    # Pooled rows are not pooled again, nor are rows of commands that have no pooled rows.
    if len(runs) < 2 or not has_same_arms or getattr(runs[-1].last, "pooled_runs", ()) is not None:
        return None
    rows = pooled_rows(runs)
    if not rows:
        return None
    if len(rows) > 1 and (rows[-1].speedup is None or not rows[-1].speedup.has_bounds):
        return None
    # These rows are in no file, so their id lists the runs that they pool. The newest comes first, so that `merge`
    # sorts this run by its time.
    ids = rows[-1].pooled_runs
    rows = [replace(row, run=", ".join(reversed(ids))) for row in rows]
    parts = [run for run in runs if run.id in ids]
    return Run(rows, runs[-1].file, runs[-1].directory, len(parts), parts)


def pooled_rows(runs: Sequence[Run[AnyRow]]) -> list[AnyRow]:
    """Pool several runs of the same settings into one row per arm, with an interval of the speed-up over units and
    runs.

    Args:
        runs: the repetitions. The rows of each begin with that of the regular arm.

    Returns:
        One row per arm, in the order of the arms; [] if fewer than two runs succeeded with the last one's number of
        threads on the CPU.
    """
    whole = [run for run in runs if run.rows and all(row.status == "ok" for row in run.rows)]
    # Times of runs with different numbers of threads cannot be pooled.
    succeeded = [run for run in whole if run.last.num_threads == whole[-1].last.num_threads]
    if len(succeeded) < 2:
        return []
    pooled_ids = [run.id for run in succeeded]
    measurements = [str(run.last.measurement) for run in succeeded]
    common = {
        # The id begins with the newest run's time. If the same runs are pooled again, id and measurement are the same.
        "run": f"{max(pooled_ids).rpartition('-')[0]}-{_digest(pooled_ids)[:6]}",
        "job": None,
        "repeat": "all",
        "repeats": len(succeeded),
        "pooled_runs": pooled_ids,
        "measurement": _digest(measurements),
        "directory": None,
    }
    pooled = []
    # All runs have the same arms, because they have the same settings.
    for rows_of_arm in zip(*(run.rows for run in succeeded), strict=True):
        columns = _pooled_figures(rows_of_arm) | common
        row: Any = replace(rows_of_arm[0], **columns)
        # The rates of acceptance are computed again from the row's added counts (`drafts`). A rate that these do not
        # determine stays the mean of the runs' rates.
        rates = {name: rate for name, rate in row.drafts.columns().items() if rate is not None}
        pooled.append(replace(row, **rates))
    if len(pooled) > 1:
        pooled[-1] = replace(pooled[-1], speedup=_speedup(succeeded) or pooled[-1].speedup)
    return judged(pooled)


def _digest(names: Sequence[str]) -> str:
    """16 hexadecimal digits, equal for the same names in any order."""
    return hashlib.sha256("|".join(sorted(names)).encode()).hexdigest()[:16]


def _pooled_figures(rows: Sequence[AnyRow]) -> dict[str, Any]:
    """The figures of an arm over its runs, by field, each pooled by the rule of its column; None if any run lacks the
    figure, if the rule is `none`, and for empty lists.

    Of an interval, only the estimate is pooled: the bounds have no rule. Lists are pooled position by position: the
    mean of [1, 2] and [3] is [2, 2].
    """
    columns: dict[str, Any] = {}
    for column in rows[0].columns().values():
        name = column.field
        if column.kind != "figure" or column.part not in ("", "estimate"):
            continue
        assert column.pools is not None, name
        values = [getattr(row, name) for row in rows]
        if None in values or column.pools == "none":
            columns[name] = None
        elif column.type is list:
            pooled_list = [_pooled(column.pools, entries) for entries in zip_longest(*values)]
            columns[name] = pooled_list or None
        else:
            weights = [getattr(row, column.per) for row in rows] if column.per else None
            columns[name] = _pooled(column.pools, values, weights)
    return columns


def _pooled(rule: Pooling, values: Sequence[Any], weights: Sequence[Any] | None = None) -> Any:
    """Pool the values of several runs, or of one position of their lists; unknown values are left out.

    None for values of the rule `same` that differ, and if no value is known.

    Args:
        rule: any rule except `none`.
        weights: weights of a mean, if all values are known; if any weight is not known or 0, all runs have the same
            weight. None for other rules.
    """
    known_values = [value for value in values if value is not None]
    if not known_values:
        return None
    if isinstance(known_values[0], Interval):
        return Interval(_pooled(rule, [value.estimate for value in known_values], weights))
    if rule == "same":
        return known_values[0] if len(set(known_values)) == 1 else None
    is_weighted = weights is not None and all(weights)
    pooled = fmean(known_values, weights) if is_weighted else _RULES[rule](known_values)
    if rule == "mean" and isinstance(known_values[0], int):
        # The mean of whole numbers is rounded to a whole number, and the mean of truth values to the value of most
        # runs.
        return type(known_values[0])(round(pooled))
    return pooled


def _speedup(runs: Sequence[Run[AnyRow]]) -> Interval | None:
    """The speed-up of several runs together, without bounds if there are too few units. None if the rows of the runs'
    prompts are not found.
    """
    waits = [waits_by_unit(pairs_by_unit(run.prompt_rows), run.last.is_batched) for run in runs]
    regular, speculative = common_times(waits)
    if not regular.size:
        return None
    # The units are those of the runs' own intervals.
    coverage = Coverage.of(runs[0].last.speedup)
    unit_name = "prompt" if coverage is None else coverage.unit
    estimate = ratio_over_runs(regular, speculative, unit_name)
    coverages = [Coverage.of(run.last.speedup) or estimate.covers for run in runs]
    # Of the runs, the one with the most units in which rejections added iterations shows best how rare they are. None,
    # which stands for at least half of the units or an unknown number, ranks highest.
    seen = max(
        coverages,
        key=lambda covers: math.inf if covers.num_rejecting is None else covers.num_rejecting,
    )
    covers = replace(
        coverage or estimate.covers,
        num_units=estimate.covers.num_units,
        # A few long answers may decide a run, so the smallest effective number of any run stands for all.
        num_effective=min(
            (covers.num_effective for covers in coverages if covers.num_effective), default=None
        ),
        num_rejecting=seen.num_rejecting,
        unseen=seen.unseen,
        num_runs=estimate.covers.num_runs,
        # With `repeats=`, each run has another seed, so sampled texts vary between runs, too.
        own_seeds=len({getattr(run.last, "seed", None) for run in runs}) == len(runs),
    )
    speedup = replace(estimate, covers=covers).interval()
    # If a few long answers leave a run without bounds, the runs together have none.
    if (covers.num_effective or FEWEST_EFFECTIVE) < FEWEST_EFFECTIVE:
        return Interval(speedup.estimate, covers=covers)
    return speedup
