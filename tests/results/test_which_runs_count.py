"""Which of several runs count: each measurement once, by its newest success, and the failures since then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.results.pooling import merge
from harness.results.runs import Run, group
from report_files import latency_run


def ended(status: str, **changes: Any) -> Run:
    """A run of one measurement; an interrupted one has the figures of some prompts."""
    part = {"ms_per_token": 1.0, "num_prompts": 3} if status == "interrupted" else {}
    return Run(latency_run(status=status, **{"measurement": "feed"} | part | changes))


@pytest.mark.parametrize(
    ("statuses", "shown", "failure"),
    [
        # The place of the run that stands for all, and their number.
        (["ok", "failed", "ok"], (2, 2), None),
        (["ok", "failed", "interrupted"], (0, 1), (2, 2)),
        (["failed", "ok", "failed"], (1, 1), (2, 1)),
        (["failed", "failed"], None, (1, 2)),
        (["interrupted", "interrupted"], (1, 2), (1, 2)),
    ],
)
def test_a_measurement_is_its_newest_success_and_the_failures_since(
    statuses: list[str], shown: tuple[int, int] | None, failure: tuple[int, int] | None
) -> None:
    runs = list(map(ended, statuses))
    found = [[(runs.index(run), run.times) for run in part] for part in merge(runs[::-1])]
    assert found == [[shown] if shown else [], [failure] if failure else []]


def test_a_pooled_row_replaces_its_runs_and_is_where_they_are(tmp_path: Path) -> None:
    runs = [ended("ok", measurement=f"{repeat}", seed=repeat) for repeat in range(3)]
    runs[0].directory = tmp_path
    pooled = ended("ok", measurement="all", pooled_runs=[run.id for run in runs[:2]])
    shown, failures = merge([pooled, *runs])
    assert ([run.id for run in shown], failures) == ([runs[2].id, pooled.id], [])
    assert shown[-1].directory == tmp_path


def test_of_copies_of_a_run_the_most_complete_one_counts(tmp_path: Path) -> None:
    whole = ended("ok")
    copies = [Run(whole.rows, directory=tmp_path), whole, Run(whole.rows[:1], directory=tmp_path)]
    (shown,), failures = merge(copies)
    assert (shown, failures) == (copies[0], [])
    assert shown.row("regular") is whole.rows[0]


def test_why_a_run_has_no_full_result() -> None:
    torn = ended("ok")
    torn.rows = torn.rows[:1]
    assert (torn.status, torn.reason) == ("incomplete", "the rows of its other arm are missing")
    assert ended("failed").reason == "no reason was recorded"
    part = ended("interrupted", error="stopped")
    part.times = 2
    assert part.reason == "stopped (the figures cover 3 prompts) (2 times)"


@pytest.mark.parametrize("own", ["environment.json", "notes.txt"])
def test_a_run_is_in_its_directory_or_where_its_file_is(tmp_path: Path, own: str) -> None:
    """A file with the environment of a run is in the directory of that run, wherever it was moved to."""
    (tmp_path / own).touch()
    directories = [tmp_path / "there", tmp_path / "gone"]
    directories[0].mkdir()
    rows = [latency_run(directory=str(directory)) for directory in directories]
    there, gone = group([*rows[0], *rows[1]], tmp_path / "latency.csv")
    assert there.directory == directories[0]
    assert gone.directory == (tmp_path if own == "environment.json" else None)
