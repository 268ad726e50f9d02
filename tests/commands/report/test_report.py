"""The report of CSV files: each measurement once, pairs by speed-up, failures with their reasons."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from harness.commands.latency.tables.ranked import RankedRun, ranked_runs
from harness.commands.report.command import build
from harness.reporting.files import Report, on_terminal
from harness.reporting.table import Table, legend
from harness.reporting.terminal import as_text
from in_process import Harness
from report_files import latency_run, prompt_rows, write
from wording import mentions


def tables(report: Report) -> dict[str, Table]:
    return {table.key: table for table in report.all_tables}


def cells(report: Report, key: str) -> list[tuple[str, ...]]:
    """The rows of a table as shown, `[]` where the report has no such table."""
    return tables(report)[key].shown()[1] if key in tables(report) else []


def notes(report: Report) -> list[str]:
    return [*report.notes]


def pairs_of(report: Report) -> list[RankedRun]:
    """The pairs of `latency` that the report shows."""
    return ranked_runs([run for run in report.runs if run.command == "latency"])


def speedups(report: Report) -> list[float]:
    return [pair.verdict.speedup.estimate for pair in pairs_of(report)]


def test_a_run_in_its_directory_and_in_the_cumulative_file_counts_once(tmp_path: Path) -> None:
    run = latency_run()
    write(tmp_path / "results" / "latency.csv", run)
    write(tmp_path / "outputs" / "latency.csv", run)
    report = build([tmp_path])
    assert speedups(report) == [2.0]
    assert pairs_of(report)[0].run.times == 1
    assert len(cells(report, "files")) == 2


def answers(report: Report) -> str:
    return " ".join(line.text for lines in report.answers.values() for line in lines)


def test_of_repeated_runs_the_newest_is_shown_with_their_number(tmp_path: Path) -> None:
    runs = [latency_run(speedup=s, measurement="feed") for s in (2.0, 2.2)]
    other = latency_run(speedup=1.1, model="30B")
    report = build([write(tmp_path / "latency.csv", *reversed(runs), other)])
    assert speedups(report) == [2.2, 1.1]
    assert cells(report, "pairs")[0][-1] == "2"
    assert mentions(legend(tables(report)["pairs"].shown()[0]), "runs:", "the newest")


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
    assert names == {
        "13B with 7B · K=2",
        "13B with 7B · K=4",
        "13B with 7B · K=8",
        "mine with MyMethod · K=4",
    }


def test_servers_are_named_by_their_hosts(tmp_path: Path) -> None:
    urls = [f"http://gpu{number}:8000/v1" for number in (1, 2)]
    served = {"engine": "server", "draft": "server", "num_draft_tokens": None}
    runs = [latency_run(url=url, devices=url, regular_url=url, **served) for url in urls]
    report = build([write(tmp_path / "latency.csv", *runs)])
    assert {row[1] for row in cells(report, "pairs")} == {
        f"on gpu{number}:8000 · regular_url gpu{number}:8000" for number in (1, 2)
    }
    assert "http" not in as_text(on_terminal(report), 132)


def test_two_measurements_that_nothing_tells_apart_are_both_shown(tmp_path: Path) -> None:
    runs = [
        latency_run(speedup=2.0, measurement="feed"),
        latency_run(speedup=2.1, measurement="beef"),
    ]
    assert sorted(map(str, speedups(build([write(tmp_path / "latency.csv", *runs)])))) == [
        "2.0",
        "2.1",
    ]


def test_a_failure_is_listed_with_its_reason_until_the_measurement_succeeds(tmp_path: Path) -> None:
    def run(**changes: Any) -> Any:
        return latency_run(measurement="feed", **changes)

    file = write(tmp_path / "latency.csv", run(status="failed", error="13B does not fit"))
    assert cells(build([file]), "failures")[0][:4] == (
        "latency",
        "13B with 7B · K=4",
        "failed",
        "13B does not fit",
    )
    write(file, run())
    report = build([file])
    assert cells(report, "failures") == []
    assert speedups(report) == [2.0]
    write(
        file,
        run(status="failed", error="out of memory"),
        run(status="failed", error="out of memory"),
    )
    report = build([file])
    assert [row[3] for row in cells(report, "failures")] == ["out of memory (2 times)"], (
        "a later failure is news"
    )
    assert speedups(report) == [2.0]


def test_another_measurement_does_not_settle_a_failure(tmp_path: Path) -> None:
    failed = latency_run(status="failed", error="killed", measurement="feed", weights="random")
    file = write(tmp_path / "latency.csv", failed, latency_run(measurement="beef"))
    assert [row[1:4] for row in cells(build([file]), "failures")] == [
        ("13B with 7B, random weights · K=4", "failed", "killed")
    ]


def test_an_interrupted_run_is_shown_as_one_and_is_never_the_best(tmp_path: Path) -> None:
    part = latency_run(
        8, speedup=3.0, status="interrupted", error="stopped", ms_per_token=1.0, num_prompts=7
    )
    report = build([write(tmp_path / "latency.csv", latency_run(), part)])
    assert [pair.best for pair in pairs_of(report)] == [True, False]
    assert "interrupted\n7 prompts" in cells(report, "pairs")[1]
    assert cells(report, "failures")[0][3] == "stopped (the figures cover 7 prompts)"
    alone = build([write(tmp_path / "alone" / "latency.csv", part)])
    assert [pair.best for pair in pairs_of(alone)] == [False]
    assert answers(alone).startswith("interrupted: the figures cover 7 prompts.")
    assert "Without a full result: 1 interrupted" in answers(alone)


def test_what_is_half_written_is_left_out_and_said(tmp_path: Path) -> None:
    file = write(tmp_path / "latency.csv", latency_run(), latency_run(8, speedup=2.5))
    file.write_bytes(file.read_bytes()[:-160])
    (tmp_path / "eval.csv").write_text("not,ours\n1,2\n")
    (tmp_path / "recovery.csv").write_bytes(b"")
    report = build([tmp_path])
    assert speedups(report) == [2.0]
    assert cells(report, "failures")[0][2:4] == (
        "incomplete",
        "the rows of its other arm are missing",
    )
    assert any("latency.csv, line 5" in note and "left out" in note for note in notes(report))
    assert [
        any(name in note for note in notes(report)) for name in ("eval.csv", "recovery.csv")
    ] == [True, True]


def test_the_whole_copy_of_a_torn_run_counts(tmp_path: Path) -> None:
    run = latency_run()
    torn = write(tmp_path / "a" / "latency.csv", run)
    torn.write_bytes(torn.read_bytes()[:-160])
    write(tmp_path / "b" / "latency.csv", run)
    assert speedups(build([tmp_path])) == [2.0]


def test_a_file_without_run_ids_is_noted_and_left_out(tmp_path: Path) -> None:
    old = tmp_path / "old" / "latency.csv"
    old.parent.mkdir()
    old.write_text("model,draft,arm,ms_per_token,speedup\n13B,7B,regular,1.0,\n")
    write(tmp_path / "latency.csv", latency_run())
    assert f"{old} has the columns of no command and was left out" in notes(build([tmp_path]))


def test_published_figures_are_next_to_the_pairs_they_are_of(tmp_path: Path) -> None:
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
    theirs = [
        (row[0].partition(" · model")[0].removesuffix(" · float16"), row[2], row[4], row[6])
        for row in rows
    ]
    assert theirs == [
        ("30B", "8× A100 40 GB", "330", ""),
        ("30B with 7B · K=4", "8× A100 40 GB", "180", "1.80×"),
        ("gpt2-xl with gpt2 · K=4", "not stated", "", "1.31× to 1.42×"),
        ("13B", "8× A100 40 GB", "125", ""),
        ("65B", "g5.12xlarge (4× A10G)", "530", ""),
        ("7B_4GPUs_8bit", "g5.12xlarge (4× A10G)", "216", ""),
    ]
    assert rows[1][5] == "52.63"
    assert rows[1][7:] == ("1.90× (1.80 to 2.00)",)


def test_a_directory_is_read_whatever_results_file_was(tmp_path: Path) -> None:
    """As after `results.file=results/before.csv`."""
    write(tmp_path / "before.csv", latency_run(4, 1.9))
    write(tmp_path / "after.csv", latency_run(4, 1.8))
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    report = build([tmp_path])
    files = {Path(row[0]).name for row in cells(report, "files")}
    assert files == {"after.csv", "before.csv"}
    assert "other.csv" not in str([*report.all_tables, *report.notes])


def test_a_protocol_is_compared_by_prompts_and_temperature(tmp_path: Path) -> None:
    pair = {"model": "qwen3-4b", "draft": "qwen3-4b-dflash", "num_draft_tokens": 15}
    # Theirs are of all iterations.
    lengths = {"mean_acceptance_length": 5.0, "tokens_per_iteration": 4.9}
    file = write(
        tmp_path / "latency.csv",
        latency_run(15, 3.0, **pair, prompts="mbpp", temperature=0.0, **lengths),
        latency_run(15, 2.0, **pair, prompts="mt_bench", temperature=1.0),
    )
    report = build([file])
    by_prompts = {row[1]: row for row in cells(report, "published")}
    assert set(by_prompts) == {"mbpp, T = 0", "mt_bench, T = 1"}
    assert by_prompts["mbpp, T = 0"][7:9] == ("4.87×", "3.00× (2.90 to 3.10)")
    assert by_prompts["mbpp, T = 0"][9:] == ("6.19", "4.90")
    (note,) = tables(report)["published"].notes
    assert "MBPP's sanitized part" in note


@pytest.mark.parametrize(("number", "is_folded"), [(1, True), (4, False)])
def test_categories_of_too_few_prompts_are_folded(
    tmp_path: Path, number: int, is_folded: bool
) -> None:
    run, other = latency_run(), latency_run(2, 1.1)
    write(tmp_path / "latency.csv", run, other)
    prompts = [(category, 50.0) for category in ("code", "chat") for _ in range(number)]
    write(tmp_path / "latency_prompts.csv", prompt_rows(run, prompts))
    assert tables(build([tmp_path]))["categories"].in_full == is_folded


def test_categories_come_from_the_prompts_of_the_run(tmp_path: Path) -> None:
    run, other = latency_run(), latency_run(2, 1.1)
    write(tmp_path / "latency.csv", run, other)
    times = [("code", 50.0)] * 2 + [("code", 40.0)] * 2 + [("chat", 80.0)]
    prompts = prompt_rows(run, times)
    write(
        tmp_path / "latency_prompts.csv",
        prompts,
        prompt_rows(other, [("code", 200.0), ("chat", 300.0)]),
    )
    report = build([tmp_path])
    code, chat = cells(report, "categories")
    assert code == ("code", "13B with 7B · K=4", "4", "2.22×", "12.5 %", "1.50")
    # One prompt has no speed-up worth a figure.
    assert chat == ("chat", "13B with 7B · K=4", "1", "", "12.5 %", "1.50")
    (environment,) = cells(report, "environment")
    assert environment[0] == "NVIDIA A100"
    # They are found through the run's directory too.
    far = latency_run(directory=str(tmp_path / "far")), latency_run(2, 1.1)
    write(tmp_path / "results" / "latency.csv", *far)
    write(
        tmp_path / "far" / "latency_prompts.csv",
        prompt_rows(far[0], [*[("code", 50.0)] * 4, ("chat", 80.0)]),
    )
    assert cells(build([tmp_path / "results"]), "categories")[0][3] == "2.00×"
    # In batches prompts share a time.
    batch = latency_run(batch_size=4)
    write(tmp_path / "b" / "latency.csv", batch, latency_run(2, 1.1, batch_size=4))
    write(
        tmp_path / "b" / "latency_prompts.csv", prompt_rows(batch, [("code", 50.0), ("chat", 80.0)])
    )
    assert cells(build([tmp_path / "b"]), "categories") == []


def test_a_file_may_have_any_name_and_hold_long_prompts(tmp_path: Path) -> None:
    file = write(tmp_path / "a100 of tuesday.csv", latency_run(error="x" * 200_000))
    assert speedups(build([file])) == [2.0]


def test_texts_are_counted_alike_in_the_table_and_in_the_sentence(tmp_path: Path) -> None:
    """A prompt that failed in both arms was not compared."""
    run, other = latency_run(num_failed=1, identical_prompts=1), latency_run(2, 1.1)
    rows = prompt_rows(run, [("code", 50.0), ("code", 40.0), ("code", 30.0)])
    parted, failed = {"divergence_position": 3}, {"error": "timeout"}
    changes = {4: failed, 5: failed, 3: parted}
    prompts = [dataclasses.replace(row, **changes.get(i, {})) for i, row in enumerate(rows)]
    write(tmp_path / "latency.csv", run, other)
    write(tmp_path / "latency_prompts.csv", prompts)
    assert any("1 of 2" in row for row in cells(build([tmp_path]), "all_arms"))


def test_single_runs_are_asked_for_by_their_ids(harness: Harness) -> None:
    runs = [latency_run(model=model) for model in ("7B", "13B", "30B")]
    write(Path("results/latency.csv"), *runs)
    first, second, _ = (str(run[0].run) for run in runs)
    shown = harness("report", first, second).stdout
    assert ("7B with" in shown, "13B with" in shown, "30B" in shown) == (True, True, False)
    assert "13B" in harness("report", second, "format=row").stdout
    assert "30B" in harness("report", first[:15]).stdout, "the beginning that all have"
    assert "no run in results has this id" in harness.refused("report", "20200101T000000")


def test_a_picture_for_a_slide(harness: Harness) -> None:
    """A labelled bar for each pair, the fastest first."""
    runs = [latency_run(2, 1.5), latency_run(4, 2.5), latency_run(8, 0.8)]
    write(Path("results/latency.csv"), *runs)
    assert "written to results/speedups.svg" in harness("report", "format=svg").stderr
    svg = Path("results/speedups.svg").read_text()
    labels = [f"13B with 7B, K={k}" for k in (4, 2, 8)]
    assert [label in svg for label in labels] == [True] * 3
    assert svg.index(labels[0]) < svg.index(labels[1]) < svg.index(labels[2])
    assert "2.50× (" in svg
    harness("report", "format=png", "output=slides")
    assert Path("slides/speedups.png").read_bytes().startswith(b"\x89PNG")
    write(Path("alone/latency.csv"), latency_run(status="failed"))
    assert "no run with a speed-up" in harness.refused("report", "alone", "format=svg")


def test_servers_are_told_apart_by_the_words_of_their_commands(tmp_path: Path) -> None:
    served = {"engine": "server", "url": "http://127.0.0.1:18801/v1", "draft": "server"}
    method = "--spec-type"
    runs = [
        latency_run(
            settings={
                "engine.start_command": f"{number}295190e",
                "engine.metrics_url": ["cuda:0", "cuda:1"],
            },
            server_command=f"llama-server -m x.gguf; llama-server -m x.gguf {method} {name}",
            temperature=temperature,
            **served,
        )
        for number, (name, temperature) in enumerate((("ngram-simple", 0.5), ("ngram-mod", 1.0)))
    ]
    runs.append(latency_run(temperature=0.5))
    report = build([write(tmp_path / "latency.csv", *runs)])
    shown = [" ".join(row) for row in cells(report, "pairs")]
    assert sum("--spec-type ngram-simple" in row for row in shown) == 1
    assert not any("llama-server" in row for row in shown)
    assert sum("--spec-type ngram-mod" in row for row in shown) == 1
    assert not any("295190e" in row for row in shown)
