"""A sweep: its words about its jobs, their workers and rows, repeats in rounds, and its jobs listed before it."""

import dataclasses
import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from harness.cli.manifest import SweepFile
from harness.cli.sweep import exit_code, job_line, print_sweep
from harness.commands.recovery.rows import RecoveryRow
from harness.measuring.rows import LatencyRow
from harness.results.files import append_rows, read_rows
from in_process import Harness, covered, results
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


def test_a_job_in_a_few_words() -> None:
    for command, rows, expected in [
        ("latency", latency_run(), "2.00× (1.90 to 2.10)"),
        ("latency", latency_run(speedup_low=None), "2.00×"),
        ("latency", latency_run(draft=None), "100.00 ms/token"),
        ("latency", latency_run(weights="random", synthetic_acceptance=0.8),
         "2.00× (1.90 to 2.10), random weights, synthetic 0.8"),
        ("latency", latency_run(status="failed", error="killed"), "failed: killed"),
        ("eval", eval_run(), "regular 43.0 %, speculative 42.0 %"),
        ("latency", [], "done"),
    ]:  # fmt: skip
        assert job_line(command, rows) == expected


def test_pairs_and_failures_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [latency_run(2, 1.5), latency_run(4, 2.0), latency_run(2, 2.5, model="30B")]
    runs.append(latency_run(4, status="failed", error="30B [bold]does not fit[/bold]", model="30B"))
    rows = [row for number, run in enumerate(runs) for row in job_rows(number, run)]
    # A job that measures the same as another one takes over its run.
    rows += job_rows(4, runs[0])
    print_sweep("latency", rows, tmp_path / "multirun/latency.csv", 6, [])
    out, error = capsys.readouterr()
    places = list(map(out.index, ("13B with 7B", "30B with 7B", "[bold]does not fit[/bold]")))
    assert places == sorted(places)
    # The answer first, which names it too.
    assert [line.count("best") for line in out.splitlines() if "2.00×" in line] == [0, 1]
    assert out.count("best") == 1, "30B was measured at one K only"
    assert out.count("1.50×") == 1
    assert mentions(error, "5 of 6 jobs", "4 measured", "1 failed")
    assert mentions(error, "multirun/latency.csv", "the same command again")
    # A job that was pooled does not hide another one that failed in every round.
    pooled = [dataclasses.replace(row, repeat="all", repeats=2) for row in runs[0]]
    print_sweep("latency", rows[:4] + rows[-4:-2], tmp_path / "multirun/latency.csv", 4, [pooled])
    assert "does not fit" in capsys.readouterr().out
    print_sweep("latency", [], tmp_path / "latency.csv", 6, [])
    assert "  Saved  0 of 6 jobs\n" in capsys.readouterr().err, "no row, and so no file"


def test_rows_of_an_earlier_sweep_go_and_those_of_single_runs_stay(tmp_path: Path) -> None:
    file = tmp_path / "latency.csv"
    append_rows(file, [LatencyRow(model="single")])
    SweepFile(tmp_path, LatencyRow).put(0, [LatencyRow(model="repeated", repeat=1)])
    append_rows(file, [LatencyRow(model="pooled", repeat="all")])
    SweepFile(tmp_path, LatencyRow).remove_jobs()
    assert [row.model for row in read_rows(file, LatencyRow)] == ["single"]
    # A single run is no job of this sweep.
    assert len(SweepFile(tmp_path, LatencyRow).put(0, [LatencyRow(model="7B")])) == 1
    assert [row.model for row in SweepFile(tmp_path, LatencyRow).job_rows()] == ["7B"]
    assert len(read_rows(file, LatencyRow)) == 2


QUICK = "latency engine=simulated num_prompts=8 tokens=4 num_warmup=0".split()


@pytest.mark.slow
def test_every_job_runs_once_before_any_runs_again(harness: Harness) -> None:
    asked = [*QUICK, "-m", "draft=lookup,none", "K=1,2", "repeats=2", "hydra.sweep.dir=sweep"]
    ended = harness(*asked)
    jobs = ["draft=lookup K=1", "draft=lookup K=2", "draft=none"]
    assert re.findall(r"^job \d of 6: (.*)$", ended.stderr, re.M) == [
        f"repeat={repeat} {job}" for repeat in (1, 2) for job in jobs
    ]
    rows = results()
    rows = rows[rows["arm"] == "speculative"]
    pooled = rows[rows["repeat"] == "all"]
    assert sorted(map(int, pooled["num_draft_tokens"])) == [1, 2]
    for covers in pooled["speedup_covers"]:
        assert covered(covers).startswith("8 prompts and 2 runs with a seed each")
    single = rows[rows["repeat"] != "all"]
    assert sorted(single["seed"]) == [0, 0, 1, 1]
    # A report shows the pooled rows in place of their runs.
    report = harness("report", "results").stdout
    # Where the machine was busy, only the verdicts are said.
    assert mentions(report, "8 prompts and 2 runs") or "faster than regular decoding in" in report
    shown = [line for line in report.splitlines() if re.match(r".* \d +\d\.\d\d×", line)]
    assert len(shown) == 2
    # A pooled row is cited with the command of its runs.
    assert "`harness latency" in harness("report", pooled["run"].iloc[0], "format=row").stdout
    # The same again, in the same directory, which has the pooled rows already.
    again = harness(*asked)
    assert again.stderr.count("measured before") == 6
    assert "6 of 6 jobs" in again.stderr
    rows_of_sweep = read_rows("sweep/latency.csv", LatencyRow)
    assert len([row for row in rows_of_sweep if row.repeat == "all"]) == 5
    assert list(results()["repeat"]).count("all") == 5


@pytest.mark.slow
def test_runs_that_were_measured_before_are_pooled_with_new_ones(harness: Harness) -> None:
    """What every run advises: more repeats than before, and fewer."""
    quick = [*QUICK, "K=2"]
    harness(*quick)
    for repeats, before in ((3, 1), (2, 2)):
        ended = harness(*quick, f"repeats={repeats}")
        assert ended.stderr.count("measured before") == before
        assert mentions(ended.stdout, f"8 prompts and {repeats} runs")
    # Without the times of its prompts a run cannot be in an interval over runs.
    for file in Path("outputs").rglob("latency_prompts.csv"):
        file.unlink()
    ended = harness(*quick, "repeats=2")
    assert ended.stderr.count("measured before") == 1
    assert mentions(ended.stdout, "8 prompts and 2 runs")


def test_a_dry_run_lists_jobs_and_makes_nothing(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    sweep = ["latency", "engine=simulated", "-m", "batch_size=1,4", "n=16", "dry_run=true"]
    launchers = ["hydra/launcher=basic"] + ["+launcher=slurm"] * (find_spec("submitit") is not None)
    for launcher in launchers:
        preview = harness(*sweep, launcher)
        assert preview.stderr == ""
        assert preview.stdout.splitlines() == [
            "  [1/2] batch_size=1: 16 prompts",
            "  [2/2] batch_size=4: 16 prompts, no interval from fewer than 8 laps: num_prompts=32 has one",
            "2 jobs. Nothing was measured.",
        ]
    assert not [*Path().iterdir()]
    Path("trace.jsonl").write_text('{"timestamp": 3, "input_length": 100}')
    for wrong in "K=0 prompts=./nothere.jsonl rule=./nothere.py:Rule prompts=./trace.jsonl".split():
        assert harness("latency", wrong, "dry_run=true", code=2).stdout == ""
    assert harness.refused("latency", "dry_run=yes") == "dry_run=yes: must be true or false"
    harness("latency", "engine=simulated", "dry_run=false")
    assert Path("results/latency.csv").exists()


@pytest.mark.parametrize(
    ("typed", "jobs"),
    [
        ("draft=lookup,none K=2,4", ["draft=lookup K=2", "draft=lookup K=4", "draft=none"]),
        ("model=tiny,7B K=2,4", ["model=tiny K=2", "model=tiny K=4", "model=7B"]),
        ("draft=lookup,tiny_draft draft.max_ngram=2,3",
         ["draft=lookup draft.max_ngram=2", "draft=lookup draft.max_ngram=3", "draft=tiny_draft"]),
        ("draft=none lenience=1.0,0.5 seed=1,2", ["seed=1", "seed=2"]),
    ],
)  # fmt: skip
def test_jobs_go_without_settings_that_have_no_effect(
    harness: Harness, typed: str, jobs: list[str]
) -> None:
    preview = harness("latency", "-m", *typed.split(), "dry_run=true").stdout
    assert re.findall(r"\] (.*): 15 prompts", preview) == jobs


SERVER = "-- llama-server -m a.gguf -md b.gguf --spec-type draft-simple"


@pytest.mark.parametrize(
    ("typed", "asked"),
    [
        ("", "15 prompts"),
        ("batch_size=4 num_prompts=auto", "32 prompts"),
        ("num_prompts=7", "7 prompts, no interval from fewer than 8 prompts: num_prompts=8 has one"),
        ("num_prompts=8 batch_size=2", "8 prompts, no interval from fewer than 8 batches: num_prompts=16 has one"),
        ("num_prompts=16 batch_size=2", "16 prompts"),
        ("num_prompts=8 batch_size=2 draft=none", "8 prompts"),
        ("prompts=./one.txt", "15 requests of 1 prompt, no interval from fewer than 8 prompts: the set has 1"),
        ("prompts=./one.txt num_prompts=16 batch_size=2", "16 requests of 1 prompt"),
        ("prompts=mt_bench", ""),
        ("url=http://h/v1 num_prompts=3", "3 prompts"),
        (f"num_prompts=3 {SERVER}", "3 prompts, no interval from fewer than 8 prompts: num_prompts=8 has one"),
        (f"engine.blocks=2 {SERVER}", "15 prompts, no interval from fewer than 4 blocks: engine.blocks=4 has one"),
    ],
)  # fmt: skip
def test_a_dry_run_says_what_is_asked_and_what_that_cannot_show(
    harness: Harness, typed: str, asked: str
) -> None:
    Path("one.txt").write_text("Hello\n")
    first = harness("latency", "dry_run=true", *typed.split()).stdout.splitlines()[0]
    assert first.partition(": ")[2] == asked


def test_a_job_without_an_interval_is_said_before_it_runs_and_next(harness: Harness) -> None:
    shown = harness(*QUICK, "-m", "batch_size=1,2")
    assert "\njob 1 of 2: batch_size=1\n" in shown.stderr
    doubt = "no interval from fewer than 8 laps: num_prompts=16 has one"
    assert f"\njob 2 of 2: batch_size=2: {doubt}\n" in shown.stderr
    assert mentions(shown.stdout, "Next an interval", "-m batch_size=1,2 num_prompts=16")


def test_a_dry_run_needs_neither_the_program_nor_the_weights(harness: Harness) -> None:
    served = ["vllm", "serve", "a/b", "--spec-method", "ngram", "--spec-tokens", "{K}"]
    shown = harness("latency", "-m", "K=2,4", "dry_run=true", "--", *served).stdout
    assert "[2/2] K=4: 15 prompts\n      regular: vllm serve a/b" in shown
    assert "\n      speculative: vllm serve a/b --spec-method ngram --spec-tokens 4" in shown
    shown = harness("latency", "draft=none", "dry_run=true", "--", "vllm", "serve", "a").stdout
    assert "\n      regular: vllm serve a" in shown
    shown = harness("recovery", "model=65B", "draft=7B", "dry_run=true").stdout
    assert "[1/1] model=65B draft=7B" in shown


@pytest.mark.parametrize("k", ["4", "2,4"])
def test_json_is_what_the_run_has_written(harness: Harness, k: str) -> None:
    printed = harness("latency", "engine=simulated", "-m", f"K={k}", "format=json").stdout
    results = [json.loads(line) for line in printed.splitlines()]
    found = [result["rows"][-1]["num_draft_tokens"] for result in results]
    assert found == [*map(int, k.split(","))]
    assert all(result["statements"] for result in results)
