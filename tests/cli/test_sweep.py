"""A sweep's words about its jobs, from the rows of its file."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from harness.cli.manifest import Manifest
from harness.cli.sweep import exit_code, job_line, print_sweep
from harness.commands.recovery.rows import RecoveryRow
from harness.measuring.rows import LatencyRow
from harness.servers.settings import ServerSettings
from report_files import eval_run, latency_run
from wording import mentions


def check(job: str, kind: str, verdict: str, status: str = "ok") -> RecoveryRow:
    return RecoveryRow(
        run=job, job=job, status=status, error="killed", check=kind, verdict=verdict,
        lossy=False, lenience=1.0, num_draft_tokens=4, num_draws=1000, power=0.5, shift=0.05, p_value=0.5,
    )  # fmt: skip


def job_rows(number: int, run: list[LatencyRow]) -> list[LatencyRow]:
    return [dataclasses.replace(row, job=str(number)) for row in run]


def test_the_worst_job_decides() -> None:
    good, doubtful, bad = (
        check(str(n), "sampled", v) for n, v in enumerate(("lossless", "undecided", "lossy"))
    )
    assert exit_code("recovery", [good, doubtful], []) == 3
    assert exit_code("recovery", [good, doubtful, bad], []) == 1
    failed = check("3", "sampled", "lossless", status="failed")
    assert exit_code("recovery", [good, failed], []) == 1


@pytest.mark.parametrize(
    ("speedups", "pooled", "expected"),
    [([2.0], [], 0), ([0.5], [], 0), ([1.05], [], 3), ([1.05, 2.0], [], 0), ([1.05, 1.05], [2.0], 0)],
)  # fmt: skip
def test_of_times_one_answer_is_enough(
    speedups: list[float], pooled: list[float], expected: int
) -> None:
    """Also that of runs which cannot tell alone."""
    rows = [row for job, speedup in enumerate(speedups) for row in latency_run(4, speedup, job=job)]
    assert exit_code("latency", rows, [latency_run(4, speedup) for speedup in pooled]) == expected


@pytest.mark.parametrize(
    ("command", "rows", "expected"),
    [
        ("latency", latency_run(), "2.00× (1.90 to 2.10)"),
        ("latency", latency_run(speedup_low=None), "2.00×"),
        ("latency", latency_run(draft=None), "100.00 ms/token"),
        ("latency", latency_run(weights="random", synthetic_acceptance=0.8),
         "2.00× (1.90 to 2.10), random weights, synthetic 0.8"),
        ("latency", latency_run(status="failed", error="killed"), "failed: killed"),
        ("eval", eval_run(), "regular 43.0 %, speculative 42.0 %"),
        ("latency", [], "done"),
    ],
)  # fmt: skip
def test_a_job_in_a_few_words(command: str, rows: list[Any], expected: str) -> None:
    assert job_line(command, rows) == expected


def test_the_command_of_a_job_is_known_where_no_command_line_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such as on another machine of a Ray cluster."""
    monkeypatch.delenv("HARNESS_COMMAND_LINE", raising=False)
    manifest = Manifest({"server": ["1", "2"]})
    engine = ServerSettings(start_command=("b", "-m", "x y"), first_command=("a",))
    assert manifest.label(["engine=server", "+server=2"], engine) == "-- b -m 'x y'"


def test_pairs_and_failures_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [latency_run(2, 1.5), latency_run(4, 2.0), latency_run(2, 2.5, model="30B")]
    runs.append(latency_run(4, status="failed", error="30B [bold]does not fit[/bold]", model="30B"))
    rows = [row for number, run in enumerate(runs) for row in job_rows(number, run)]
    # A job that measures the same as another one takes over its run.
    rows += job_rows(4, runs[0])
    print_sweep(
        "latency",
        rows,
        tmp_path / "multirun/latency.csv",
        6,
        [],
    )
    out, error = capsys.readouterr()
    assert (
        out.index("13B with 7B") < out.index("30B with 7B") < out.index("[bold]does not fit[/bold]")
    )
    # The answer first, which names it too.
    assert [line.count("best") for line in out.splitlines() if "2.00×" in line] == [0, 1]
    assert out.count("best") == 1, "30B was measured at one K only"
    assert out.count("1.50×") == 1
    assert mentions(error, "5 of 6 jobs", "multirun/latency.csv", "the same command again")
