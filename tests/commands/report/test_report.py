"""The report of CSV files: each measurement once, pairs by speed-up, failures with their reasons."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness.commands.latency.ranking import RankedRun, ranked_runs
from harness.commands.report.command import build
from harness.reporting.files import ReportContents
from in_process import Harness
from report_files import all_tables, latency_run, prompt_rows, write


def cells(report: ReportContents, key: str) -> list[tuple[str, ...]]:
    """The rows of a table as shown, `[]` where the report has no such table."""
    tables = {table.key: table for table in all_tables(report)}
    return tables[key].shown()[1] if key in tables else []


def pairs_of(report: ReportContents) -> list[RankedRun]:
    """The pairs of `latency` that the report shows."""
    return ranked_runs([run for run in report.runs if run.command == "latency"])


def speedups(report: ReportContents) -> list[float]:
    return [pair.interval.estimate for pair in pairs_of(report)]


def test_a_run_in_its_directory_and_in_the_cumulative_file_counts_once(tmp_path: Path) -> None:
    run = latency_run()
    write(tmp_path / "results" / "latency.csv", run)
    write(tmp_path / "outputs" / "latency.csv", run)
    report = build([tmp_path])
    assert speedups(report) == [2.0]
    assert pairs_of(report)[0].run.times == 1
    assert len(cells(report, "files")) == 2


def test_of_repeated_runs_the_newest_is_shown_with_their_number(tmp_path: Path) -> None:
    runs = [latency_run(speedup=s, measurement="feed") for s in (2.0, 2.2)]
    other = latency_run(speedup=1.1, model="30B")
    report = build([write(tmp_path / "latency.csv", *reversed(runs), other)])
    assert speedups(report) == [2.2, 1.1]
    assert cells(report, "pairs")[0][-1] == "2"


def test_names_have_no_paths_and_no_fields_of_methods(tmp_path: Path) -> None:
    """Two checkouts of one project, and an older file without columns of its draft."""
    here, there = ({"draft_repository": f"/{place}/shipped/tiny_draft"} for place in ("a", "b"))
    drafts = {"draft_method": "model", "draft_quantization": "none"}
    runs = [
        latency_run(2, 1.5, **here, **drafts),
        latency_run(4, 2.0, **there, **drafts),
        latency_run(8, 1.8, draft_quantization=None),
        latency_run(4, 1.7, draft="./my_method.py:MyMethod", model="./models/mine/"),
    ]
    report = build([write(tmp_path / "latency.csv", *runs)])
    names = {pair.name.label() for pair in pairs_of(report)}
    assert names == {*(f"13B with 7B · K={k}" for k in (2, 4, 8)), "mine with MyMethod · K=4"}


def test_a_failure_is_listed_with_its_reason_until_the_measurement_succeeds(tmp_path: Path) -> None:
    def run(**changes: Any) -> Any:
        return latency_run(measurement="feed", **changes)

    file = write(tmp_path / "latency.csv", run(status="failed", error="13B does not fit"))
    [failure] = cells(build([file]), "unjudged")
    assert failure[:3] == ("13B with 7B", "4", "failed: 13B does not fit")
    write(file, run())
    report = build([file])
    assert cells(report, "unjudged") == []
    assert speedups(report) == [2.0]
    write(file, *[run(status="failed", error="out of memory") for _ in range(2)])
    report = build([file])
    # A later failure is news.
    assert [row[2] for row in cells(report, "unjudged")] == ["failed: out of memory (2 times)"]
    assert speedups(report) == [2.0]


def test_an_interrupted_run_is_shown_as_one_and_is_never_the_best(tmp_path: Path) -> None:
    part = latency_run(8, 3.0, status="interrupted", error="stopped", ms_per_token=1.0)
    report = build([write(tmp_path / "latency.csv", latency_run(), part)])
    assert [pair.is_best_of_draft for pair in pairs_of(report)] == [True, False]
    [interrupted] = cells(report, "unjudged")
    assert interrupted[:4] == (
        "13B with 7B",
        "8",
        "interrupted: stopped (the figures cover 15 prompts)",
        "3.00×",
    )
    alone = build([write(tmp_path / "alone" / "latency.csv", part)])
    assert [pair.is_best_of_draft for pair in pairs_of(alone)] == [False]


def test_what_is_half_written_is_left_out_and_said(tmp_path: Path) -> None:
    file = write(tmp_path / "latency.csv", latency_run(), latency_run(8, speedup=2.5))
    file.write_bytes(file.read_bytes()[:-160])
    (tmp_path / "eval.csv").write_text("not,ours\n1,2\n")
    (tmp_path / "recovery.csv").write_bytes(b"")
    report = build([tmp_path])
    assert speedups(report) == [2.0]
    assert cells(report, "unjudged")[0][1].startswith("incomplete: ")
    for name in ("latency.csv, line 5", "eval.csv", "recovery.csv"):
        assert any(name in note for note in report.notes)


def test_published_figures_are_next_to_the_pairs_they_are_of(tmp_path: Path) -> None:
    file = write(
        tmp_path / "latency.csv",
        latency_run(4, 1.9, model="30B"),
        latency_run(4, 1.4, model="gpt2-xl", draft="gpt2"),
        latency_run(4, 2.0, model="./30B"),
        latency_run(model="65B", draft=None, quantization="8bit"),
        latency_run(4, 1.9, model="65B", status="interrupted", ms_per_token=1.0),
    )
    rows = cells(build([file]), "published")
    theirs = [
        (row[0].partition(" · model")[0].removesuffix(" · float16"), row[2], row[4], row[6])
        for row in rows
    ]
    assert theirs == [
        ("30B", "8× A100 40 GB", "330", ""),
        ("30B with 7B · K=4", "8× A100 40 GB", "180", "1.80×"),
        ("gpt2-xl with gpt2 · K=4", "not stated", "", "1.31× to 1.42×"),
        ("65B", "g5.12xlarge (4× A10G)", "530", ""),
    ]
    assert rows[1][5] == "52.63"
    assert rows[1][7:] == ("1.90× (1.80 to 2.00)",)


def test_categories_come_from_the_prompts_of_the_run(tmp_path: Path) -> None:
    run, other = latency_run(), latency_run(2, 1.1)
    write(tmp_path / "latency.csv", run, other)
    times = [("code", 50.0)] * 2 + [("code", 40.0)] * 2 + [("chat", 80.0)]
    others = prompt_rows(other, [("code", 200.0), ("chat", 300.0)])
    write(tmp_path / "latency_prompts.csv", prompt_rows(run, times), others)
    report = build([tmp_path])
    code, chat = cells(report, "categories")
    assert code == ("code", "13B with 7B · K=4", "4", "2.22×", "12.5 %", "1.50")
    # One prompt has no speed-up worth a figure.
    assert chat == ("chat", "13B with 7B · K=4", "1", "", "12.5 %", "1.50")
    (environment,) = cells(report, "environment")
    assert environment[0] == "NVIDIA A100"


def test_single_runs_are_asked_for_by_their_ids(harness: Harness) -> None:
    runs = [latency_run(model=model) for model in ("7B", "13B", "30B")]
    write(Path("results/latency.csv"), *runs)
    first, second, _ = (str(run[0].run) for run in runs)
    shown = harness("report", first, second).stdout
    assert ("7B with" in shown, "13B with" in shown, "30B" in shown) == (True, True, False)
    assert "13B" in harness("report", second, "format=row").stdout
    assert len(harness("report", "format=row").stdout.splitlines()) == 2 + 3
    for run in ("20200101T000000", "20200101"):
        assert "no run in results has this id" in harness.refused("report", run)
