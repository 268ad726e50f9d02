"""Figures of random weights, or of a coin in place of the rule, are never taken for figures of a pair."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.results.labels import is_real, labels
from harness.results.recovery_report import summarise
from harness.results.report import report
from harness.results.report.tables import Table
from harness.results.sweep_report import job_line
from report_files import eval_run, latency_run, write

RANDOM: dict[str, Any] = {"weights": "random"}
COIN: dict[str, Any] = {"synthetic_acceptance": 0.8, "lossy": True}


def tables(path: Path) -> dict[str, Table]:
    return {table.key: table for table in report.build([path]).tables}


def names(table: Table) -> list[str]:
    return [row.cells[0].split("\n")[0] for row in table.rows]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"draft": "7B"}, []),
        ({"draft": "7B", "weights": "stored", "synthetic_acceptance": None}, []),
        ({"draft": "7B", "weights": "stored", "synthetic_acceptance": ""}, []),
        ({"draft": None, "weights": "random"}, ["random weights"]),
        ({"draft": "7B", "weights": "random", "synthetic_acceptance": "0.80"}, ["random weights", "synthetic 0.8"]),
        ({"draft": "7B", "weights": "stored", "synthetic_acceptance": 0.0}, ["synthetic 0"]),
        ({"draft": None, "weights": "stored", "synthetic_acceptance": 0.8}, []),
    ],
)
def test_what_a_row_is_called(row: dict[str, Any], expected: list[str]) -> None:
    assert labels(row) == expected
    assert is_real(row) == (not expected)


def test_groups_of_their_own_behind_the_real_ones(tmp_path: Path) -> None:
    stored = {"weights": "stored", "synthetic_acceptance": None}
    write(
        tmp_path / "latency.csv",
        latency_run(speedup=3.0, **stored | RANDOM, measurement="a"),
        latency_run(speedup=4.0, **stored | RANDOM | COIN, measurement="b"),
        latency_run(speedup=2.5, **stored | COIN, measurement="c"),
        latency_run(speedup=2.0, **stored, measurement="d"),
    )
    built = report.build([tmp_path])
    assert names(tables(tmp_path)["pairs"]) == [
        "13B with 7B",
        "13B with 7B, random weights, synthetic 0.8",
        "13B with 7B, random weights",
        "13B with 7B, synthetic 0.8",
    ]
    assert len({line.group for line in built.lines}) == 4
    assert built.headlines[0].startswith("13B with 7B, K=4: 2.00×"), "what is made up is no finding beside a real one"
    notes = " ".join(tables(tmp_path)["pairs"].notes)
    assert "random weights: times are those" in notes
    assert "a coin of that bias" in notes
    assert "lenience" not in notes


def test_nothing_published_stands_beside_them(tmp_path: Path) -> None:
    write(tmp_path / "latency.csv", latency_run(weights="stored", synthetic_acceptance=None))
    assert "published" in tables(tmp_path)
    for number, made_up in enumerate((RANDOM, COIN)):
        write(tmp_path / str(number) / "latency.csv", latency_run(**{"synthetic_acceptance": None, **made_up}))
        assert "published" not in tables(tmp_path / str(number))


def test_alone_they_are_labelled_too(tmp_path: Path) -> None:
    write(tmp_path / "latency.csv", latency_run(**RANDOM, **COIN))
    built = report.build([tmp_path])
    assert names(tables(tmp_path)["pairs"]) == ["13B with 7B, random weights, synthetic 0.8"]
    assert "13B with 7B, random weights, synthetic 0.8" in built.headlines[0]


def test_runs_without_the_column_are_not_repetitions_of_made_up_ones(tmp_path: Path) -> None:
    older = write(tmp_path / "old.csv", latency_run())
    made_up = write(tmp_path / "new.csv", latency_run(**RANDOM, synthetic_acceptance=None, speedup=3.0))
    stored = write(tmp_path / "stored.csv", latency_run(weights="stored", synthetic_acceptance=None, commit="b" * 40))
    assert [line.run.times for line in report.build([older, made_up]).lines] == [1, 1]
    assert [line.run.times for line in report.build([older, stored]).lines] == [2]


def test_a_failure_says_which_pair_it_was(tmp_path: Path) -> None:
    write(tmp_path / "latency.csv", latency_run(**RANDOM, status="failed", error="out of memory"))
    assert "13B with 7B, random weights" in tables(tmp_path)["failures"].rows[0].cells[1]


def test_accuracies_keep_their_names(tmp_path: Path) -> None:
    write(tmp_path / "eval.csv", eval_run(weights="stored", synthetic_acceptance=None))
    assert names(tables(tmp_path)["accuracy"])[0] == "13B with 7B"


def test_a_line_of_a_sweep_is_labelled() -> None:
    (regular, speculative) = latency_run(**RANDOM, **COIN)
    assert job_line("latency", [regular, speculative]) == "2.00× (1.90 to 2.10), random weights, synthetic 0.8"


def test_a_coin_is_a_loss_by_definition() -> None:
    row = {
        "check": "greedy", "verdict": "lossless", "prompt_index": None, "identical_prompts": 2, "num_prompts": 2,
        "num_tokens": 8, "logit_margin": None, "lenience": 1.0, "power": None, "draft": "7B", **COIN,
    }  # fmt: skip
    summary = summarise([row])
    assert summary.verdict == "lossy"
    assert "a coin of bias 0.8 is lossy by definition" in summary.sentence
