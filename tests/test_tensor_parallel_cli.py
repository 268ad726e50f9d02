"""Runs by two processes through the command line: the tokens of one, a single writer, and an end when a rank dies."""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd
import psutil
import pytest
import torch

import forked
from processes import run, start
from wording import mentions

TORCHRUN = [
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc-per-node",
    "2",
    "-m",
    "harness",
]
SHORT = "latency decoding=greedy num_prompts=2 num_warmup=0 num_resamples=100 decoding.max_new_tokens=8".split()
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


def completions(directory: Path) -> pd.DataFrame:
    rows = pd.read_csv(directory / "latency_prompts.csv")
    return rows[
        ["prompt_index", "prompt", "arm", "completion", "num_tokens", "acceptance_histogram"]
    ]


def is_rank(process: psutil.Process) -> bool:
    try:
        return "harness.cli.worker" in " ".join(process.cmdline())
    except psutil.Error:  # it has ended
        return False


def is_dead(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def runners_after_both(tmp_path: Path, **environment: str) -> list[str]:
    """The runners of one process and of two, which must have written the same, and once each."""
    forked.run(
        *SHORT,
        "placement=single,tensor_parallel",
        "placement.gpus=2",
        "-m",
        cwd=tmp_path,
        **environment,
    )
    one, two = sorted(tmp_path.glob("multirun/*/*/*/[01]"))
    pd.testing.assert_frame_equal(completions(one), completions(two))
    assert {file.name for file in one.iterdir()} == {file.name for file in two.iterdir()}
    said = (two / "log.txt").read_text()
    assert "tiny + tiny_draft" in said
    assert "model tiny: split over 2 ranks" in said
    assert mentions(said, "tiny_draft", "2 ranks")
    rows = pd.read_csv(tmp_path / "results" / "latency.csv")
    assert list(rows["arm"]) == ["regular", "speculative"] * 2
    assert list(rows["placement"]) == ["single"] * 2 + ["tensor_parallel"] * 2
    assert set(rows["status"]) == {"ok"}
    return list(rows["runner"][::2])


@pytest.mark.slow
def test_two_processes_give_the_tokens_of_one_and_write_once(tmp_path: Path) -> None:
    assert runners_after_both(tmp_path, **NO_GPU) == ["static", "static"]


@pytest.mark.gpu
@pytest.mark.slow
def test_two_gpus_give_the_tokens_of_one_and_split_models_are_captured(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    assert runners_after_both(tmp_path) == ["graphs", "graphs"]


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_run_with_a_failed_row(tmp_path: Path) -> None:
    long = [
        *SHORT,
        "model=tiny_draft",
        "draft=lookup",
        "placement=tensor_parallel",
        "num_prompts=100",
        "decoding.max_new_tokens=40",
    ]
    # Written when the first prompt has been answered.
    running = start(*long, cwd=tmp_path, until="**/latency_prompts.csv", command=TORCHRUN, **NO_GPU)
    everybody = psutil.Process(running.pid).children(recursive=True)
    ranks = [process for process in everybody if is_rank(process)]
    assert len(ranks) == 2
    [second] = [process for process in ranks if process.environ().get("RANK") == "1"]
    second.kill()
    # Less than the ten minutes for which ranks wait for each other.
    _, said = running.communicate()
    assert running.returncode == 1
    assert mentions(said, "rank 1", "SIGKILL")
    rows = pd.read_csv(tmp_path / "results" / "latency.csv")
    assert list(rows["status"]) == ["failed", "failed"]
    assert rows["error"].str.contains("rank").all()
    # One that nobody has waited for yet is dead all the same.
    assert not [process for process in ranks if process.is_running() and not is_dead(process)]


def test_two_processes_for_another_placement_are_refused(tmp_path: Path) -> None:
    refused = run(*SHORT, cwd=tmp_path, code=1, command=TORCHRUN, **NO_GPU)
    assert (
        "harness: placement.strategy=auto: must be tensor_parallel under torchrun" in refused.stderr
    )
