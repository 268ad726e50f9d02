"""Several runs of `latency`: which count, and how they are pooled into one row per arm."""

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.measuring.rows import LatencyRow
from harness.results import pooling
from harness.results.drafts import Drafts
from harness.results.files import append_rows
from harness.results.pooling import merge
from harness.results.prompt_times import Wait, pairs_by_unit, wait_for, waits_by_unit
from harness.results.rows.prompts import LatencyPromptRow
from harness.results.runs import Run, runs_of
from harness.results.statistics.runs import ratio_over_runs
from report_files import latency_run, over

NUM_PROMPTS = 10


def measured(directory: Path, repeat: int, slowness: float, **changes: Any) -> list[LatencyRow]:
    """A run whose regular arm takes 40 ms per prompt and token, times a slowness of the run."""
    folder = directory / str(repeat)
    folder.mkdir()
    prompts = [
        LatencyPromptRow(
            run=f"run-{repeat}",
            prompt_index=index,
            arm=arm,
            unit=index,
            num_tokens=10,
            time_ms=10 * (40 + index) * (0.5 if arm == "speculative" else slowness),
        )
        for index in range(changes.get("num_prompts", NUM_PROMPTS))
        for arm in ("regular", "speculative")
    ]
    # Runs differ in the regular arm alone.
    append_rows(folder / "latency_prompts.csv", prompts)
    asked: dict[str, Any] = {
        "run": f"run-{repeat}", "measurement": f"digest-{repeat}", "directory": str(folder), "repeat": repeat,
        "speedup_covers": over(NUM_PROMPTS), "num_prompts": NUM_PROMPTS, "speedup": 2.0,
        "acceptance_histogram": [1] * repeat, "temperature": 0.0, "seed": repeat if changes.get("temperature") else 0,
    }  # fmt: skip
    return latency_run(**(asked | changes))


def pooled_rows(runs: Sequence[Sequence[LatencyRow]]) -> list[LatencyRow]:
    """The rows of these runs, pooled; each run is in the directory that its rows name."""
    directories = [rows[0].directory for rows in runs]
    placed = zip(runs, directories, strict=True)
    return pooling.pooled_rows([Run(list(rows), directory=at and Path(at)) for rows, at in placed])


def test_an_interval_over_prompts_and_runs(tmp_path: Path) -> None:
    slownesses = (1.0, 1.1, 0.95)
    runs = [measured(tmp_path, number, slow) for number, slow in enumerate(slownesses, 1)]
    rows = regular, speculative = pooled_rows(runs)
    ms = np.array([[(40 + index) * slow for index in range(NUM_PROMPTS)] for slow in slownesses])
    halves = np.broadcast_to(np.arange(40, 50) / 2, ms.shape)
    expected = ratio_over_runs(ms, halves).interval()
    speedup = speculative.speedup
    bounds = (expected.estimate, expected.low, expected.high)
    assert (speedup.estimate, speedup.low, speedup.high) == pytest.approx(bounds)
    assert str(speculative.speedup.covers) == "10 prompts and 3 runs"
    assert (speculative.repeat, speculative.repeats) == ("all", 3)
    assert speculative.pooled_runs == regular.pooled_runs == ["run-1", "run-2", "run-3"]
    # The same runs have the same id, in whichever order they are pooled; other runs have another.
    assert speculative.run == regular.run == pooled_rows(runs[::-1])[-1].run
    assert speculative.run != pooled_rows(runs[1:])[-1].run
    assert [row.arm for row in rows] == ["regular", "speculative"]
    assert (speculative.acceptance_histogram, regular.speedup) == ([3, 2, 1], None)
    # Runs of one measurement are shown as one, with the ids of all, the newest first, where the newest one is, even if
    # they were moved away from the directories that their rows name.
    moved = [Path(run[0].directory) for run in runs]
    one = [[replace(row, measurement="feed", directory="gone") for row in run] for run in runs]
    (shown,), _ = merge([Run(rows, Path(f"f{n}"), moved[n]) for n, rows in enumerate(one)])
    assert (shown.id, shown.times) == ("run-3, run-2, run-1", 3)
    assert (shown.file, shown.directory) == (Path("f2"), moved[2])
    # A run with another number of threads is not pooled with them, and is shown alone.
    alone = [replace(row, run="run-0", num_threads=2) for row in one[0]]
    assert [run.id for run in merge([Run(alone), *shown.parts])[0]] == ["run-0", shown.id]


@pytest.mark.parametrize(
    ("covers", "num_prompts", "has_bounds"),
    [
        # A few of them are long answers.
        (over(10, num_effective=2), 10, False),
        (over(10), 10, True),
        (over(5), 5, False),
        (over(5, "block"), 5, True),
    ],
)
def test_few_units_have_no_interval_over_runs_either(
    tmp_path: Path, covers: dict[str, Any], num_prompts: int, has_bounds: bool
) -> None:
    asked = {"speedup_covers": covers, "num_prompts": num_prompts}
    speedup = pooled_rows([measured(tmp_path, n, 1.0, **asked) for n in (1, 2)])[-1].speedup
    assert (speedup.has_bounds, speedup.covers.unit) == (has_bounds, covers["unit"])
    assert speedup.covers.num_effective == covers.get("num_effective")


def test_the_run_in_which_fewest_units_count_decides(tmp_path: Path) -> None:
    asked = [{"speedup_covers": over(10, num_effective=number)} for number in (4, 3)]
    runs = [measured(tmp_path, n, 1.0, num_prompts=10, **covers) for n, covers in enumerate(asked)]
    pooled = [pooled_rows(ordered)[-1].speedup for ordered in (runs, runs[::-1])]
    assert [speedup.covers.num_effective for speedup in pooled] == [3, 3]


def test_the_run_with_most_rejections_shows_what_may_be_missed(tmp_path: Path) -> None:
    counts: list[dict[str, Any]] = [
        {"num_rejecting": 0, "unseen": 0.04},
        {"num_rejecting": 3, "unseen": 0.09},
        {},
    ]
    runs = [
        measured(tmp_path, n, 1.0, num_prompts=10, speedup_covers=over(10, **c))
        for n, c in enumerate(counts)
    ]
    few, enough = (pooled_rows(pooled)[-1].speedup.covers for pooled in (runs[:2], runs))
    assert (few.num_rejecting, few.unseen) == (3, 0.09)
    assert (enough.num_rejecting, enough.unseen) == (None, 0.0)


def test_every_rule_makes_one_figure_of_two(tmp_path: Path) -> None:
    """Ends of intervals are not averaged: 2.0 (1.9 to 2.1) and 1.2 (1.1 to 1.3) make no 1.55 (1.45 to 1.65)."""
    figures: dict[str, tuple[Any, Any, Any]] = {
        "decode_speedup": (2.0, 1.2, pytest.approx(1.6)),
        "decode_speedup_low": (1.9, 1.1, None),
        "decode_speedup_high": (2.1, 1.3, None),
        "stopped_by": ("budget", "budget", "budget"),
        "gpu_throttled": ("power cap", "power brake", None),
        "shortest_answer": (5, 7, 5),
        "longest_answer": (5, 7, 7),
        # Two halves are no majority.
        "drifted": (False, True, False),
        "identical_prompts": (15, 14, 14),
        "differing_prompts": (0, 1, 1),
        "interleaved": (True, False, False),
        "num_skipped": (1, 2, 2),
        "verify_ms": (1.0, None, None),
        "draft_ms": (None, 1.0, None),
        "ms_per_token_std": (3.0, 4.0, pytest.approx(math.sqrt(12.5))),
        # Of older versions, which wrote no counts.
        "acceptance_histogram": (None, None, None),
        "acceptance_by_position": ([0.9, None], [0.5, None, 0.3], [0.7, None, 0.3]),
    }
    runs = []
    for repeat in (1, 2):
        columns = {name: values[repeat - 1] for name, values in figures.items()}
        runs.append(measured(tmp_path, repeat, 1.0, **columns))
    pooled = pooled_rows(runs)[-1].values()
    expected = {name: values[2] for name, values in figures.items()}
    assert {name: pooled[name] for name in figures} == expected


def test_only_runs_that_succeeded_are_pooled(tmp_path: Path) -> None:
    statuses = ("ok", "failed", "ok", "interrupted")
    runs = [measured(tmp_path, repeat, 1.0, temperature=0.5) for repeat in (1, 2, 3, 4)]
    pairs = zip(runs, statuses, strict=True)
    ended_so = [[replace(row, status=status) for row in rows] for rows, status in pairs]
    last = pooled_rows(ended_so)[-1]
    assert (last.repeats, last.pooled_runs, last.status) == (2, ["run-1", "run-3"], "ok")
    assert last.speedup.covers.own_seeds
    threads = zip(runs, (1, 2, 2, 1), strict=True)
    same = [[replace(row, seed=0, num_threads=n) for row in rows] for rows, n in threads]
    last = pooled_rows(same)[-1]
    assert (last.pooled_runs, last.speedup.covers.own_seeds) == (["run-1", "run-4"], False)
    assert pooled_rows(ended_so[:2]) == []


# Figures that are one total over another, by these.
QUOTIENTS = {
    "ms_per_token": ("wait_ms", "num_tokens"),
    "tokens_per_second": ("num_tokens", "measured_s"),
    "requests_per_second": ("num_prompts", "measured_s"),
    "mean_in_flight": ("request_seconds", "measured_s"),
    "tokens_per_iteration": ("num_decoded", "num_iterations"),
    "iteration_ms": ("iterations_ms", "num_iterations"),
    "mean_num_draft_tokens": ("num_proposed", "num_iterations"),
    "mean_proposed": ("num_proposed", "num_drafting"),
    "acceptance_rate": ("num_accepted", "num_proposed"),
    "share_after_end": ("after_end", "num_tokens"),
}


def test_a_pooled_rate_is_the_total_over_the_total() -> None:
    """Of runs with other lengths and times, as the columns' texts define them. Their directories are not needed."""
    rng = random.Random(0)
    names = sorted({name for pair in QUOTIENTS.values() for name in pair})
    stored = LatencyRow.columns().keys() & names
    runs = [{name: rng.randrange(10, 1000) for name in names} for _ in range(3)]
    for totals in runs:
        # There are fewest of what was accepted, and most tokens.
        order = ("num_accepted", "num_drafting", "num_proposed", "num_iterations", "num_decoded")
        totals |= dict(zip(order, sorted(totals[name] for name in order), strict=True))

    def row(totals: dict[str, int]) -> LatencyRow:
        quotients = {name: totals[top] / totals[below] for name, (top, below) in QUOTIENTS.items()}
        counts = {name: totals[name] for name in stored}
        length = 1 + totals["num_accepted"] / totals["num_drafting"]
        return LatencyRow(status="ok", mean_acceptance_length=length, **counts, **quotients)

    (pooled,) = pooled_rows([[row(totals)] for totals in runs])
    expected = row({name: sum(totals[name] for totals in runs) for name in names})
    for name in (*QUOTIENTS, "mean_acceptance_length"):
        assert getattr(pooled, name) == pytest.approx(getattr(expected, name)), name


def test_rates_by_position_are_those_of_all_iterations() -> None:
    """Where runs tested a position unequally often, no mean of their rates is the rate of all."""
    parts = [Drafts.of([(2, 2), (2, 0)]), Drafts.of([(2, 1), (2, 1), (2, 1), (1, 1)])]
    runs = [[LatencyRow(status="ok", **part.count_columns(), **part.columns())] for part in parts]
    (pooled,) = pooled_rows(runs)
    assert pooled.acceptance_by_position == [0.8333, 0.25]
    assert pooled.conditional_acceptance_rate == pytest.approx(6 / 10)
    assert (pooled.num_proposed, pooled.tested_by_position) == (11, [6, 4])


def answer(index: int, first_ms: float, num_tokens: int, unit: int = 0) -> LatencyPromptRow:
    return LatencyPromptRow(
        arm="regular", prompt_index=index, prompt_place=index, unit=unit, num_tokens=num_tokens,
        time_ms=100.0, time_to_first_token_ms=first_ms,
    )  # fmt: skip


def test_rows_of_a_batch_are_one_answer_of_mean_length() -> None:
    """Requests that took equally long are no batch, and neither are rows of another one."""
    together = [answer(0, 20.0, 8), answer(1, 20.0, 12)]
    assert wait_for(together, is_batched=True) == (100.0, 10.0)
    assert wait_for(together, is_batched=False) == (200.0, 20.0)
    assert wait_for([answer(0, 20.0, 8), answer(1, 25.0, 12)], is_batched=True) == (200.0, 20.0)
    assert wait_for(together, is_batched=True, after_first=True) == (80.0, 9.0)
    unknown = replace(together[0], time_to_first_token_ms=None)
    assert wait_for([unknown], is_batched=False, after_first=True) == (100.0, 8.0)


def test_an_answer_that_one_arm_lacks_is_left_out() -> None:
    """Of a lap the others count. Its name has all of its places, by which those of several runs are matched."""
    regular = [answer(index, 20.0, 8, unit=index // 2) for index in range(4)]
    speculative = [
        replace(answer(index, 20.0, 4, unit=index // 2), arm="speculative", error=error)
        for index, error in ((0, None), (1, "500: failed"), (3, None))
    ]
    units = pairs_by_unit([*regular, *speculative])
    both = (Wait(100.0, 8.0), Wait(100.0, 4.0))
    assert waits_by_unit(units, is_batched=False) == {(0, 1): both, (2, 3): both}
    # Files of older versions have no units: each prompt is one.
    alone = [replace(row, unit=None) for row in [*regular, *speculative]]
    assert pairs_by_unit(alone).keys() == {(0,), (3,)}
    # Where units share prompts they are known by their numbers.
    shared = [replace(row, prompt_place=0) for row in [*regular, *speculative]]
    assert pairs_by_unit(shared).keys() == {0, 1}


def test_a_unit_whose_tokens_came_at_once_has_no_time_after_the_first() -> None:
    rows = [
        replace(answer(index, first_ms, num_tokens, unit=index), arm=arm)
        for index, (first_ms, num_tokens) in enumerate([(20.0, 8), (100.0, 8), (20.0, 1)])
        for arm in ("regular", "speculative")
    ]
    units = pairs_by_unit(rows)
    waits = waits_by_unit(units, is_batched=True, after_first=True)
    assert waits == {(0,): ((80.0, 7.0), (80.0, 7.0))}
    assert waits_by_unit(units, is_batched=True).keys() == units.keys()


def ended(status: str, **changes: Any) -> Run:
    """A run of one measurement; an interrupted one has the figures of some prompts."""
    part = {"ms_per_token": 1.0, "num_prompts": 3} if status == "interrupted" else {}
    return Run(latency_run(status=status, **{"measurement": "feed"} | part | changes))


def test_a_measurement_is_its_newest_success_and_the_failures_since() -> None:
    for statuses, shown, failure in [
        # The place of the run that stands for all, and their number.
        (["ok", "failed", "ok"], (2, 2), None),
        (["ok", "failed", "failed"], (0, 1), (2, 2)),
        (["failed", "ok", "failed"], (1, 1), (2, 1)),
        (["failed", "failed"], None, (1, 2)),
        (["interrupted", "interrupted"], (1, 2), (1, 2)),
    ]:
        runs = list(map(ended, statuses))
        found = [[(runs.index(run), run.times) for run in part] for part in merge(runs[::-1])]
        assert found == [[shown] if shown else [], [failure] if failure else []]
    # Each reason is kept, with the number of runs that have it.
    reasons = [ended("failed", error=reason) for reason in ("no room", "stopped", "no room")]
    failed = [(run.reason, run.times) for run in merge(reasons)[1]]
    assert failed == [("stopped", 1), ("no room (2 times)", 2)]


def test_a_pooled_row_replaces_its_runs_and_is_where_they_are(tmp_path: Path) -> None:
    runs = [ended("ok", measurement=f"{repeat}", seed=repeat) for repeat in range(3)]
    runs[0].directory = tmp_path
    pooled = ended("ok", measurement="all", pooled_runs=[run.id for run in runs[:2]])
    shown, failures = merge([pooled, *runs])
    assert ([run.id for run in shown], failures) == ([runs[2].id, pooled.id], [])
    assert shown[-1].directory == tmp_path
    more = ended("ok", measurement="more", pooled_runs=[run.id for run in runs])
    assert merge([pooled, *runs, more])[0] == [more], "with a larger `repeats=`"
    again = ended("ok", measurement="all", pooled_runs=["a", "b"])
    assert merge([pooled, *runs, again])[0] == [runs[2], again], "with `resume=false`"


def test_of_copies_of_a_run_the_most_complete_one_counts(tmp_path: Path) -> None:
    whole = ended("ok")
    copies = [Run(whole.rows, directory=tmp_path), whole, Run(whole.rows[:1], directory=tmp_path)]
    assert merge(copies) == ([copies[0]], [])
    assert copies[0].row("regular") is whole.rows[0]


def test_why_a_run_has_no_full_result() -> None:
    torn = ended("ok")
    torn.rows = torn.rows[:1]
    assert (torn.status, torn.reason) == ("incomplete", "the rows of its other arm are missing")
    assert ended("failed").reason == "no reason was recorded"
    part = ended("interrupted", error="stopped")
    part.times = 2
    assert part.reason == "stopped (the figures cover 3 prompts) (2 times)"
    part.rows[0] = replace(part.rows[0], num_prompts=4)
    covered = "stopped (the figures cover 4 regular and 3 speculative prompts) (2 times)"
    assert part.reason == covered


@pytest.mark.parametrize("own", ["environment.json", "notes.txt"])
def test_a_run_is_in_its_directory_or_where_its_file_is(tmp_path: Path, own: str) -> None:
    """A file with the environment of a run is in the directory of that run, wherever it was moved to."""
    (tmp_path / own).touch()
    directories = [tmp_path / "there", tmp_path / "gone"]
    directories[0].mkdir()
    rows = [latency_run(directory=str(directory)) for directory in directories]
    there, gone = runs_of([*rows[0], *rows[1]], tmp_path / "latency.csv")
    assert there.directory == directories[0]
    assert gone.directory == (tmp_path if own == "environment.json" else None)
