"""A sweep through the command line whose jobs fail in every way and whose own process is killed again and again."""

import collections
import random
import resource
import signal
import time
from functools import partial
from pathlib import Path

import pandas as pd
import pytest

import pretended_box
from forked import run, start
from harness.measuring.rows import LatencyRow
from harness.results.files import append_rows, read_rows
from in_process import Harness
from processes import end
from wicked_engine import FATAL, FILE
from wording import mentions

NUMBERS = [2, FATAL]
REASONS = {
    "Wicked": "ZeroDivisionError|a bug in the engine",
    "Greedy": "out of main memory, .* GB free",
    "Killed": "its process was killed by SIGKILL",
}


def command(*more: str) -> list[str]:
    return [
        *("latency", "-m", "num_prompts=2", "num_warmup=0", "decoding.max_new_tokens=12"),
        f"engine={','.join(f'{FILE}:{name}' for name in REASONS)}",
        f"decoding.num_draft_tokens={','.join(map(str, NUMBERS))}",
        *more,
    ]


@pytest.mark.slow
def test_every_job_has_one_final_row_whatever_happens(tmp_path: Path) -> None:
    chance = random.Random(0)
    for _ in range(2):
        sweep = start(*command(), cwd=tmp_path, until="multirun/*")
        time.sleep(chance.uniform(0, 2))
        # On a fast machine it may have ended.
        sweep.kill()
        sweep.wait()
    finished = run(*command(), cwd=tmp_path, code=1)

    newest = max((tmp_path / "multirun" / "latency").glob("*/*"))
    rows = pd.read_csv(newest / "latency.csv")
    num_jobs = len(REASONS) * len(NUMBERS)
    assert f"{num_jobs} of {num_jobs} jobs" in finished.stderr
    per_arm = rows.groupby(["engine", "num_draft_tokens", "seed"]).size()
    speculative = rows[rows["arm"] == "speculative"]
    assert len(speculative) == num_jobs == rows["job"].nunique()
    assert len(rows) == 2 * num_jobs
    assert (per_arm == 1).all()

    failed = speculative["status"] == "failed"
    assert (failed == (speculative["num_draft_tokens"] == FATAL)).all()
    for name, reason in REASONS.items():
        errors = speculative[failed & speculative["engine"].str.endswith(f":{name}")]["error"]
        assert len(errors) == 1
        assert errors.str.contains(reason).all(), list(errors)

    everything = pd.read_csv(tmp_path / "results" / "latency.csv")
    measured = everything[everything["status"] == "ok"]
    counts = collections.Counter(zip(measured["measurement"], measured["arm"], strict=True))
    assert len(counts) == 2 * int((~failed).sum())
    assert set(counts.values()) == {1}, "nothing is measured twice"
    assert not [*newest.rglob("*.tmp"), *(tmp_path / "results").rglob("*.tmp")], (
        "a killed sweep may leave one in its own directory"
    )


@pytest.mark.slow
def test_a_job_that_hangs_is_ended_and_the_next_one_begins(tmp_path: Path) -> None:
    arguments = command(f"engine={FILE}:Hanging,simulated", f"decoding.num_draft_tokens={FATAL}")
    run(*arguments, "job_timeout_s=2", cwd=tmp_path, code=1)
    (file,) = (tmp_path / "multirun" / "latency").glob("*/*/latency.csv")
    rows = pd.read_csv(file)
    assert list(rows["job"]) == [0, 0, 1, 1]
    hung = rows[rows["job"] == 0]
    assert hung["error"].str.contains("took longer than job_timeout_s=2").all()


WAITING = """
import torch
from harness.config.acceptance_rules import AcceptanceRule
from harness.local.decoding.verify import verify

class Waiting(AcceptanceRule):
    lossless = True

    def verify(self, offer):
        torch.cuda.synchronize()
        return verify(offer)
"""


@pytest.mark.slow
def test_a_failed_capture_leaves_the_next_job_its_graphs(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(WAITING)
    rules = "decoding.rule=./mine.py:Waiting,deepmind"
    sizes = ["num_prompts=2", "num_warmup=0", "decoding.max_new_tokens=4"]
    arguments = ["latency", "-m", "model=tiny", rules, "runner=static", *sizes]
    run(*arguments, cwd=tmp_path, code=None, before=pretended_box.enter)
    (file,) = (tmp_path / "multirun" / "latency").glob("*/*/latency.csv")
    rows = pd.read_csv(file)
    runners = [set(of_job) for _, of_job in rows.groupby("job")["runner"]]
    assert runners == [{"static, no graphs"}, {"static"}]


@pytest.mark.slow
def test_a_job_with_a_wrong_setting_is_in_the_table_of_its_sweep_alone(harness: Harness) -> None:
    """The models show that a setting is wrong: what the target's layers are is known when they are read."""
    arguments = ["latency", "model=tiny_draft", "num_prompts=2", "decoding.max_new_tokens=4"]
    wrong = [*arguments, "engine=huggingface", "draft=early_exit", "draft.layers=[9]"]
    complaint = harness.refused(*wrong)
    assert mentions(complaint, "draft.layers=[9]", "the target has 2 layers")
    assert not Path("results/latency.csv").exists()
    assert not list(Path("outputs").rglob("latency.csv"))

    swept = harness(*wrong, "-m", "draft=lookup,early_exit", "hydra.sweep.dir=s", code=2)
    assert "[2/2] draft=early_exit: refused: draft.layers=[9]" in swept.stderr
    assert "the same command again" not in swept.stderr
    assert "Saved  2 of 2 jobs (1 measured, 1 refused) in s/latency.csv" in swept.stderr
    assert "draft.layers=[9]" in " ".join(swept.stdout.split())
    statuses = {row.draft: row.status for row in read_rows("s/latency.csv", LatencyRow)}
    assert statuses == {"lookup": "ok", "early_exit": "refused"}
    assert {row.draft for row in read_rows("results/latency.csv", LatencyRow)} == {"lookup"}


@pytest.mark.slow
def test_ctrl_c_ends_the_sweep_with_its_rows(tmp_path: Path) -> None:
    # The first job hangs, and no time limit ends it.
    arguments = command(f"engine={FILE}:Hanging", f"decoding.num_draft_tokens={FATAL}")
    sweep = start(*arguments, cwd=tmp_path, until="hanging")
    _, said = end(sweep, signal.SIGINT, 130)
    (file,) = (tmp_path / "multirun" / "latency").glob("*/*/latency.csv")
    assert set(pd.read_csv(file)["status"]) == {"interrupted"}
    assert "Traceback" not in said
    assert "1 of 1 job (1 interrupted)" in said
    assert "(0.0 s" not in said


@pytest.mark.slow
def test_a_job_whose_rows_cannot_be_collected_fails_and_keeps_them(tmp_path: Path) -> None:
    """A full disk, here a limit on the size of files."""
    collected = tmp_path / "latency.csv"
    append_rows(collected, [LatencyRow(error="x" * 40_000)])
    sweep = [
        *("latency", "-m", "engine=simulated", "K=2,3", "num_prompts=1", "num_warmup=0"),
        *("decoding.max_new_tokens=4", f"results.file={collected}"),
    ]
    limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (40_960, 40_960))
    done = run(*sweep, cwd=tmp_path, code=1, before=limit)
    assert done.stderr.count(f"failed: {collected} cannot be written: File too large") == 2
    (swept,) = (tmp_path / "multirun" / "latency").glob("*/*/latency.csv")
    assert set(pd.read_csv(swept)["status"]) == {"failed"}
    for job in ("0", "1"):
        rows = pd.read_csv(swept.parent / job / "latency.csv")
        assert set(rows["status"]) == {"ok"}
        assert rows["ms_per_token"].notna().all()
    assert len(read_rows(collected, LatencyRow)) == 1


def test_another_sweep_in_the_same_directory_is_refused(harness: Harness, tmp_path: Path) -> None:
    plan = ["plan", "-m", "hydra.sweep.dir=s"]
    harness(*plan, "batch_size=1,2,3")
    assert "contains another sweep" in harness.refused(*plan, "batch_size=4")
    assert list(pd.read_csv(tmp_path / "s" / "plan.csv").batch_size) == [1, 2, 3]


def test_what_a_sweep_cannot_write_is_a_line_below_it(harness: Harness, tmp_path: Path) -> None:
    plan = ["plan", "-m", "hydra.sweep.dir=s", "batch_size=1,2"]
    harness(*plan)
    # As on a full disk.
    for name in ("summary.txt", "0/log.txt"):
        (tmp_path / "s" / name).unlink(missing_ok=True)
        (tmp_path / "s" / name).mkdir()
    again = harness(*plan, code=1)
    assert "Next" in again.stdout
    assert "2 of 2 jobs" in again.stderr
    assert "Traceback" not in again.stderr
    assert again.complaint == "s/summary.txt cannot be written: Is a directory"
