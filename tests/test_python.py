"""Commands called from Python: rows as a DataFrame, exceptions in place of exit codes, several calls in one process."""

import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import harness
from forked import fork_worker
from harness.cli import worker
from harness.measuring.rows import LatencyRow
from harness.results.files import append_rows
from harness.results.schema import CORE_COLUMNS, frame
from in_process import QUICKEST_PAIR
from shipped_copies import copy_shipped

SHORT = ["num_prompts=2", "num_warmup=0", "decoding.max_new_tokens=4"]


@pytest.fixture(autouse=True)
def _directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(worker, "start_process", fork_worker)


def test_a_run_returns_its_rows_and_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGTERM), list(sys.argv)
    rows = harness.run("latency", *SHORT, "draft=none")
    assert isinstance(rows, pd.DataFrame)
    assert list(rows["arm"]) == ["regular"]
    assert rows["ms_per_token"].dtype.kind == "f"
    assert rows["run"].notna().all()
    assert capsys.readouterr() == ("", "")
    assert (signal.getsignal(signal.SIGTERM), sys.argv) == before
    again = harness.run("latency", *SHORT, "decoding=greedy", verbose=True)
    assert list(again["arm"]) == ["regular", "speculative"]
    assert isinstance(again["acceptance_histogram"][1], list)
    assert "tiny + tiny_draft" in capsys.readouterr().out
    # Both are in the file that collects all runs, as from the command line.
    collected = pd.read_csv("results/latency.csv")
    assert list(collected["run"]) == [*rows["run"], *again["run"]]


def test_a_regular_arm_has_the_k_of_its_run() -> None:
    shared = {"status": "ok", "model": "30B", "draft": "7B", "ms_per_token": 10.0}
    rows = [
        LatencyRow(run=f"run {k}", arm=arm, num_draft_tokens=own_k, **shared)
        for k in (2, 4)
        for arm, own_k in (("regular", None), ("speculative", k))
    ]
    returned = frame(rows)
    # The core is always there, also without an interval.
    assert list(returned.columns[:12]) == list(CORE_COLUMNS)
    assert not returned.drop(columns=list(CORE_COLUMNS)).isna().all().any()
    wide = returned.pivot(index="num_draft_tokens", columns="arm", values="ms_per_token")
    assert list(wide.index) == [2, 4]
    chosen = LatencyRow(run="run a", arm="speculative", num_draft_tokens="auto", **shared)
    assert list(frame([*rows, chosen])["num_draft_tokens"]) == [2, 2, 4, 4, "auto"]


def test_the_documented_tables_have_one_row_per_pair(capsys: pytest.CaptureFixture[str]) -> None:
    """Of a failed run, two runs and their pool, a lossy run, and made-up ones."""
    shared: dict[str, Any] = {"arm": "speculative", "draft": "d", "status": "ok", "prompts": "p"}
    shared |= {"model": "a_b", "prompts_digest": "f1"}
    greedy = {"temperature": 0.0, "num_draft_tokens": 4, **shared}
    lossy = {"temperature": 0.5, "num_draft_tokens": 2, "rule": "google", "lenience": 0.5}
    other = {"model": "c", "prompts_digest": "f2"}
    made_up = [{"engine": "simulated"}, {"weights": "random"}, {"synthetic_acceptance": 0.9}]
    rows = [
        LatencyRow(run="run 1", **greedy | {"status": "failed"}),
        LatencyRow(run="run 2", **greedy),
        LatencyRow(run="run 3", **greedy),
        LatencyRow(run="run 4", pooled_runs=["run 2", "run 3"], **greedy),
        LatencyRow(run="run 5", **shared | lossy | other),
        *(LatencyRow(run=f"run {6 + n}", **greedy, **made_up[n]) for n in range(3)),
        # `repeats=` was raised.
        LatencyRow(run="run 9", **greedy),
        LatencyRow(run="run 91", pooled_runs=["run 2", "run 3", "run 9"], **greedy),
    ]
    append_rows("results/latency.csv", rows)
    docs = Path(__file__).parents[1] / "docs"
    (table,) = re.findall(
        r"```python\n(.*?)```", (docs / "numbers.md").read_text("utf-8"), re.DOTALL
    )
    found: dict[str, Any] = {}
    exec(table, found)
    assert [line.split(" & ")[:6] for line in capsys.readouterr().out.splitlines()[4:7]] == [
        ["c", "p f2", "2", "0.5", "google", "0.5"],
        ["a\\_b", "p f1", "4", "0", "", ""],
        ["\\bottomrule"],
    ]
    # Rows differ in these only together with others, or are left out.
    named = {*found["settings"], "lossy", "draft_method", "prompts_file", "url", "regular_url"}
    named |= set("weights synthetic_acceptance repeats repeat repository draft_repository".split())
    columns = LatencyRow.columns().items()
    assert {name for name, column in columns if column.kind == "setting"} <= named
    (pivot,) = re.findall(
        r"(^pairs = .*)^by_k.plot",
        (docs / "python.md").read_text("utf-8"),
        re.DOTALL | re.MULTILINE,
    )
    found = {"sweep": frame(rows[1:5])}
    exec(pivot, found)
    assert list(found["by_k"].index) == [2, 4]


def test_runs_of_two_threads_have_their_own_rows() -> None:
    stdout, found = sys.stdout, {}

    def measure(seed: int) -> None:
        found[seed] = harness.run("latency", *SHORT, model="tiny_draft", draft=None, seed=seed)

    threads = [threading.Thread(target=measure, args=[seed]) for seed in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {seed: list(rows["seed"]) for seed, rows in found.items()} == {1: [1], 2: [2], 3: [3]}
    assert sys.stdout is stdout


@pytest.mark.parametrize(
    ("arguments", "keywords", "message"),
    [
        ([3], {}, "command=3: must be one of latency"),
        (["latency", 4], {}, "settings=4: must be text"),
        (["latency", "--help"], {}, "--help: is for the command line"),
        (["latency", "--version"], {}, "--version: is for the command line"),
        # A server's words are its own, and keywords are the command's.
        (["latency", "--", "no-server", "-c", "9"], {"batch_size": 0}, "batch_size=0: must be"),
        (["latency"], {"batch_size": object()}, "batch_size=<object>: must be text, a number"),
        (["latency", "decoding.top_p=2"], {}, "decoding.top_p=2.0: must be in (0, 1]"),
        (["latency", "-m", "seed=1,2", "decoding.top_p=2"], {}, "decoding.top_p=2.0: must be in"),
        (["report", "results"], {}, "report: is a command of the terminal: harness report"),
    ],
)
def test_a_mistake_is_raised(
    arguments: list[Any], keywords: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(harness.SettingError) as error:
        harness.run(*arguments, **keywords)
    assert str(error.value).startswith(message)
    assert "harness:" not in capsys.readouterr().err


def test_a_failed_run_is_raised_and_keeps_its_row() -> None:
    copy_shipped(Path("broken"))
    Path("broken/model.safetensors").write_bytes(b"no weights")
    with pytest.raises(harness.RunError):
        harness.run("latency", *SHORT, "model=./broken", "draft=none")
    assert list(pd.read_csv("results/latency.csv")["status"]) == ["failed"]


@pytest.mark.slow
def test_a_sweep_returns_the_rows_of_all_jobs(capsys: pytest.CaptureFixture[str]) -> None:
    rows = harness.run("latency", *QUICKEST_PAIR, *SHORT, "-m", "seed=1,2")
    assert list(zip(rows["job"], rows["arm"], rows["seed"], strict=True)) == [
        (job, arm, seed) for job, seed in (("0", 1), ("1", 2)) for arm in ("regular", "speculative")
    ]
    assert capsys.readouterr() == ("", "")


@pytest.mark.slow
def test_a_sweep_in_a_script_needs_no_guard(tmp_path: Path) -> None:
    # Jobs that fail before they need torch, in workers that would run the script again.
    settings = ["engine=server", "engine.url=http://127.0.0.1:9/v1", *SHORT, "seed=1,2"]
    (tmp_path / "script.py").write_text(
        f"import harness\nrows = harness.run('latency', '-m', *{settings!r})\n"
        "print(list(rows['status']))\nprint('end')\n"
    )
    command = [sys.executable, "script.py"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.stdout == "['failed', 'failed']\nend\n", result.stderr
