"""What the report makes of CSV files: each measurement once, pairs by speed-up, failures with their reasons."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from harness.config.errors import SettingError
from harness.results.files import write_rows
from harness.results.report.pairs import predicted_curve
from harness.results.report.report import Report, build, print_pairs
from report_files import eval_run, latency_run, write


def cells(report: Report, key: str) -> list[tuple[str, ...]]:
    """The rows of a table, `[]` where the report has no such table."""
    return [row.cells for table in report.tables if table.key == key for row in table.rows]


def speedups(report: Report) -> list[float | None]:
    return [line.speedup for line in report.lines]


def test_a_run_in_its_directory_and_in_the_cumulative_file_counts_once(tmp_path: Path) -> None:
    run = latency_run()
    write(tmp_path / "results" / "latency.csv", run)
    write(tmp_path / "outputs" / "latency.csv", run)
    report = build([tmp_path])
    assert speedups(report) == [2.0]
    assert report.lines[0].run.times == 1
    assert len(report.lines[0].run.files) == 2


def test_of_repeated_runs_the_newest_is_shown_with_their_number(tmp_path: Path) -> None:
    later = latency_run(speedup=2.2, timestamp="2026-11-20T11:00:00+00:00")
    file = write(tmp_path / "latency.csv", later, latency_run(speedup=2.0))
    report = build([file])
    assert speedups(report) == [2.2]
    assert cells(report, "pairs")[0][-1] == "2"


@pytest.mark.parametrize("difference", [{"temperature": 1.0}, {"num_prompts": 30}, {"devices": "NVIDIA H200"}])
def test_other_settings_are_other_measurements_and_are_told_apart(tmp_path: Path, difference: dict[str, Any]) -> None:
    file = write(tmp_path / "latency.csv", latency_run(), latency_run(speedup=1.5, **difference))
    names = [row[0] for row in cells(build([file]), "pairs")]
    assert len(names) == 2
    assert str(next(iter(difference.values()))) in names[1].replace("1.0", "1").replace("temperature 1", "1.0")


def test_a_column_that_only_later_files_have_keeps_nothing_apart(tmp_path: Path) -> None:
    old, new = latency_run(speedup=2.0), latency_run(speedup=2.1, timestamp="2026-11-21T10:00:00+00:00")
    for row in new:
        row |= {"measurement": "feed", "directory": "multirun/0"}
    write(tmp_path / "latency.csv", old, new)
    assert (tmp_path / "latency-2.csv").exists()
    report = build([tmp_path])
    assert speedups(report) == [2.1]
    assert report.lines[0].run.times == 2


def test_two_measurements_with_the_same_visible_settings_are_both_shown(tmp_path: Path) -> None:
    runs = [latency_run(speedup=2.0), latency_run(speedup=2.1, timestamp="2026-11-21T10:00:00+00:00")]
    for run, digest in zip(runs, ("feed", "beef"), strict=True):
        for row in run:
            row["measurement"] = digest
    names = [row[0] for row in cells(build([write(tmp_path / "latency.csv", *runs)]), "pairs")]
    assert [day in name for day, name in zip(("2026-11-20", "2026-11-21"), names, strict=True)] == [True, True]


def test_a_failure_stands_with_its_reason_until_the_measurement_succeeds(tmp_path: Path) -> None:
    failed = latency_run(status="failed", error="13B does not fit")
    file = write(tmp_path / "latency.csv", failed)
    assert cells(build([file]), "failures")[0][:4] == ("latency", "13B with 7B · K=4", "failed", "13B does not fit")
    write(file, latency_run(timestamp="2026-11-20T10:00:00+00:00"))
    report = build([file])
    assert cells(report, "failures") == []
    assert speedups(report) == [2.0]
    write(file, latency_run(status="failed", error="out of memory", timestamp="2026-11-20T12:00:00+00:00"))
    report = build([file])
    assert [row[3] for row in cells(report, "failures")] == ["out of memory"], "a later failure is news"
    assert speedups(report) == [2.0]


def test_a_failure_is_made_good_by_its_own_measurement_alone(tmp_path: Path) -> None:
    failed = latency_run(status="failed", error="killed")
    ok = latency_run(timestamp="2026-11-20T11:00:00+00:00")
    for run, digest in ((failed, "feed"), (ok, "beef")):
        for row in run:
            row["measurement"] = digest
    file = write(tmp_path / "latency.csv", failed, ok)
    assert [row[3] for row in cells(build([file]), "failures")] == ["killed"]
    for row in ok:
        row["measurement"] = "feed"
    write(file, ok)
    assert cells(build([file]), "failures") == []


def test_an_interrupted_run_is_shown_as_one_and_is_never_the_best(tmp_path: Path) -> None:
    part = latency_run(8, speedup=3.0, status="interrupted", error="stopped", ms_per_token=1.0, num_prompts=7)
    report = build([write(tmp_path / "latency.csv", latency_run(), part)])
    assert [line.best for line in report.lines] == [True, False]
    assert "interrupted\n7 prompts" in cells(report, "pairs")[1]
    assert cells(report, "failures")[0][3] == "stopped (the figures cover 7 prompts)"
    alone = build([write(tmp_path / "alone" / "latency.csv", part)])
    assert [line.best for line in alone.lines] == [False]
    assert not alone.headlines[0].startswith("13B")


def test_what_is_half_written_is_left_out_and_said(tmp_path: Path) -> None:
    file = write(tmp_path / "latency.csv", latency_run(), latency_run(8, speedup=2.5))
    file.write_bytes(file.read_bytes()[:-60])
    (tmp_path / "eval.csv").write_text("not,ours\n1,2\n")
    (tmp_path / "recovery.csv").write_bytes(b"")
    report = build([tmp_path])
    assert speedups(report) == [2.0]
    assert cells(report, "failures")[0][2:4] == ("incomplete", "the rows of its other arm are missing")
    assert any("latency.csv, line 5" in note and "left out" in note for note in report.notes)
    assert [any(name in note for note in report.notes) for name in ("eval.csv", "recovery.csv")] == [True, True]


def test_a_directory_that_a_killed_job_left_is_listed(tmp_path: Path) -> None:
    write(tmp_path / "0" / "latency.csv", latency_run())
    job = tmp_path / "1"
    (job / ".hydra").mkdir(parents=True)
    (job / ".hydra" / "config.yaml").write_text("seed: 0\ncommand: latency\n")
    (job / ".hydra" / "overrides.yaml").write_text("- model=65B\n- draft=7B\n")
    failure = cells(build([tmp_path]), "failures")[0]
    assert failure[0] == "latency"
    assert failure[2] == "no result"
    assert "model=65B, draft=7B" in failure[3]


def test_pairs_come_by_their_best_speedup_with_k_ascending(tmp_path: Path) -> None:
    runs = [latency_run(8, 1.9), latency_run(2, 1.2), latency_run(4, 2.1)]
    runs += [latency_run(4, 2.0, model="30B"), latency_run(2, 2.4, model="30B"), latency_run(model="7B", draft=None)]
    report = build([write(tmp_path / "latency.csv", *runs)])
    shown = [(line.pair, line.num_draft_tokens, line.best) for line in report.lines]
    assert shown == [
        ("30B with 7B", 2, True), ("30B with 7B", 4, False),
        ("13B with 7B", 2, False), ("13B with 7B", 4, True), ("13B with 7B", 8, False),
        ("7B", None, False),
    ]  # fmt: skip
    assert [row[-1] for row in cells(report, "pairs")] == ["best K", "", "", "best K", "", ""]


def test_the_prediction_is_the_formula_at_a_measured_k(tmp_path: Path) -> None:
    report = build([write(tmp_path / "latency.csv", latency_run(2), latency_run(4))])
    curve = dict(predicted_curve(report.lines))
    alpha, draft, verify = 0.8, 0.1, 1.2
    for k in (2, 4):
        assert curve[k] == pytest.approx((1 - alpha ** (k + 1)) / (1 - alpha) / (k * draft + verify))
    # Between 1 at K = 0 and 1.2 at K = 2 lies 1.1.
    assert curve[1] == pytest.approx((1 - alpha**2) / (1 - alpha) / (draft + 1.1))


def test_a_pair_that_loses_is_told_why(tmp_path: Path) -> None:
    run = latency_run(4, 0.8)
    run[1] |= {"draft_ms": 400.0, "predicted_speedup": 0.85}
    report = build([write(tmp_path / "latency.csv", run)])
    notes = next(table.notes for table in report.tables if table.key == "reasons")
    assert "the draft is too slow" in notes[0]
    assert "does not pay" in report.headlines[0]


def test_published_figures_stand_beside_the_pairs_they_are_of(tmp_path: Path) -> None:
    file = write(
        tmp_path / "latency.csv",
        latency_run(4, 1.9, model="30B"),
        latency_run(4, 1.4, model="gpt2-xl", draft="gpt2"),
        latency_run(4, 2.0, model="./30B"),
        latency_run(4, 1.2, model="13B", draft="7B_4GPUs_8bit"),
        latency_run(model="7B_4GPUs_8bit", draft=None),
        latency_run(model="65B", draft=None, quantization="8bit"),
    )
    rows = cells(build([file]), "published")
    theirs = [(row[0].removesuffix(" · float16"), row[2], row[4], row[6]) for row in rows]
    assert theirs == [
        ("30B", "8× A100 40 GB", "330", ""),
        ("30B with 7B · K=4", "8× A100 40 GB", "180", "1.80×"),
        ("gpt2-xl with gpt2 · K=4", "not stated", "", "1.31× to 1.42×"),
        ("13B", "8× A100 40 GB", "125", ""),
        ("65B", "g5.12xlarge (4× A10G)", "530", ""),
        ("7B_4GPUs_8bit", "g5.12xlarge (4× A10G)", "216", ""),
    ]
    assert rows[1][5] == "52.63"
    assert rows[1][7:] == ("1.90×", "1.80 to 2.00")


def test_accuracy_comes_merged_with_bounds_and_the_published_figure(tmp_path: Path) -> None:
    report = build([write(tmp_path / "eval.csv", eval_run())])
    regular, speculative = cells(report, "accuracy")
    assert regular[3:6] == ("1000", "43.0 ± 3.0", "40.1 to 46.1")
    assert speculative[6] == "-1.0\n-3.0 to 1.0"
    assert (regular[-1], speculative[-1]) == ("42.9", "43.1")
    assert report.headlines == ["No sure difference in accuracy between the arms (1 evaluation)."]


def test_categories_come_from_the_prompts_of_the_run(tmp_path: Path) -> None:
    run = latency_run()
    write(tmp_path / "latency.csv", run)
    (tmp_path / "environment.json").write_text(json.dumps({"hostname": "box", "total_memory_bytes": 64_000_000_000}))
    prompts = [
        {
            "prompt_index": index, "category": category, "prompt": "p", "arm": arm, "completion": "c", "num_tokens": 10,
            "time_ms": time, "acceptance_histogram": "[1, 1]" if arm == "speculative" else None,
        }
        for index, (category, fast) in enumerate([("code", 50.0), ("code", 40.0), ("chat", 80.0)])
        for arm, time in (("regular", 100.0), ("speculative", fast))
    ]  # fmt: skip
    write_rows(tmp_path / "latency_prompts.csv", prompts)
    report = build([tmp_path])
    table = next(table for table in report.tables if table.key == "categories")
    assert table.columns == ("pair", "code (2)", "chat (1)")
    assert [cell.split("\n")[0] for cell in table.rows[0].cells[1:]] == ["2.22×", "1.25×"]
    assert table.rows[0].cells[1].endswith("1.50 tokens")
    assert ("host", "box") in cells(report, "environment")
    # In batches no prompt has a time of its own.
    write(tmp_path / "b" / "latency.csv", latency_run(batch_size=4))
    (tmp_path / "latency_prompts.csv").rename(tmp_path / "b" / "latency_prompts.csv")
    assert cells(build([tmp_path / "b"]), "categories") == []


@pytest.mark.parametrize("given", ["nowhere", "empty", "other.csv"])
def test_a_path_without_anything_of_ours_is_refused(tmp_path: Path, given: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    write(tmp_path / "latency.csv", latency_run())
    with pytest.raises(SettingError, match=given):
        build([tmp_path / "latency.csv", tmp_path / given])


def test_a_file_may_be_called_anything_and_hold_long_prompts(tmp_path: Path) -> None:
    file = write(tmp_path / "a100 of tuesday.csv", latency_run(error="x" * 200_000))
    assert speedups(build([file])) == [2.0]


@pytest.mark.parametrize("reader", ["as written", "csv", "pandas"])
def test_pairs_are_printed_from_rows_however_they_were_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], reader: str
) -> None:
    runs = [latency_run(2, 1.5), latency_run(4, 2.0), latency_run(2, 2.5, model="30B")]
    runs.append(latency_run(4, status="failed", error="30B [bold]does not fit[/bold]", model="30B"))
    file = write(tmp_path / "latency.csv", *runs)
    if reader == "as written":
        rows: list[dict[str, Any]] = [row for run in runs for row in run]
    elif reader == "csv":
        with file.open(newline="") as lines:
            rows = list(csv.DictReader(lines))
    else:
        rows = [{str(key): value for key, value in row.items()} for row in pd.read_csv(file).to_dict("records")]
    print_pairs(rows)
    out = capsys.readouterr().out
    assert out.index("30B with 7B") < out.index("13B with 7B") < out.index("[bold]does not fit[/bold]")
    assert [line.count("best K") for line in out.splitlines() if "2.00×" in line] == [1]
    assert out.count("best K") == 1, "30B was measured at one K only"


def test_nothing_to_print_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    print_pairs([])
    assert capsys.readouterr().out == "nothing was measured\n"
