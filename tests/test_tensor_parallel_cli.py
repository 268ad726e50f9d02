"""Runs by two processes through the command line: the tokens of one, a single writer, and an end when a rank dies."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import psutil
import pytest
import torch

PYTHON = [sys.executable, "-m", "harness"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "harness"]
SHORT = "latency decoding=greedy num_prompts=2 num_warmup=0 num_resamples=100 decoding.max_new_tokens=8".split()
SPLIT = ["placement=tensor_parallel", "placement.gpus=2"]


def environment() -> dict[str, str]:
    return os.environ | {"CUDA_VISIBLE_DEVICES": ""}


def run(directory: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=directory, env=environment(), capture_output=True, text=True, timeout=900)


def completions(directory: Path) -> pd.DataFrame:
    rows = pd.read_csv(directory / "latency_prompts.csv")
    return rows[["prompt_index", "prompt", "arm", "completion", "num_tokens", "acceptance_histogram"]]


def runners_after_both(tmp_path: Path) -> list[str]:
    """Which runners one process and two had, once they are known to have written the same, and once each."""
    sweep = run(tmp_path, *PYTHON, *SHORT, "placement=single,tensor_parallel", "placement.gpus=2", "-m")
    assert sweep.returncode == 0, sweep.stderr
    one, two = sorted(tmp_path.glob("multirun/*/*/*/[01]"))
    pd.testing.assert_frame_equal(completions(one), completions(two))
    assert {file.name for file in one.iterdir()} == {file.name for file in two.iterdir()}
    said = (two / "log.txt").read_text()
    assert said.count("Greedy output is identical") == 1
    assert "model tiny: split over 2 ranks" in said
    assert "draft tiny_draft: a copy on each of 2 ranks" in said
    rows = pd.read_csv(tmp_path / "results" / "latency.csv")
    assert list(rows["arm"]) == ["regular", "speculative"] * 2
    assert list(rows["placement"]) == ["single"] * 2 + ["tensor_parallel"] * 2
    assert set(rows["status"]) == {"ok"}
    return list(rows["runner"][::2])


@pytest.mark.slow
def test_two_processes_give_the_tokens_of_one_and_write_once(tmp_path: Path) -> None:
    assert runners_after_both(tmp_path) == ["static", "static"]


@pytest.mark.gpu
@pytest.mark.slow
def test_two_gpus_give_the_tokens_of_one_and_whole_drafts_are_captured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    monkeypatch.setattr(f"{__name__}.environment", lambda: dict(os.environ))
    assert runners_after_both(tmp_path) == ["graphs", "static+graphs"]


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_run_with_a_failed_row(tmp_path: Path) -> None:
    command = [*TORCHRUN, *SHORT, "placement=tensor_parallel", "num_prompts=10", "decoding.max_new_tokens=200"]
    running = subprocess.Popen(command, cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 900
    # Written when the weights have loaded.
    while not list(tmp_path.rglob("environment.json")) and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(1)
    everybody = psutil.Process(running.pid).children(recursive=True)
    ranks = [process for process in everybody if "harness.sweep.worker" in " ".join(process.cmdline())]
    assert len(ranks) == 2
    max(ranks, key=lambda process: (process.create_time(), process.pid)).kill()
    # Far less than the minutes for which ranks wait for each other.
    _, said = running.communicate(timeout=400)
    assert running.returncode == 1
    assert "harness: the process of rank 1 was killed by SIGKILL" in said
    rows = pd.read_csv(tmp_path / "results" / "latency.csv")
    assert list(rows["status"]) == ["failed", "failed"]
    assert rows["error"].str.contains("rank").all()
    assert not any(process.is_running() for process in ranks)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["model=tiny_8bit"], "model.quantization=8bit: cannot be combined with tensor_parallel"),
        (["placement.offload=cpu"], "placement.offload=cpu: cannot be combined with tensor_parallel"),
        (["placement.device_map={model:cpu}"], "placement.device_map={'model': 'cpu'}: cannot be combined with"),
        (["draft.placement=balanced"], "draft.placement=balanced: cannot be combined with tensor_parallel"),
    ],
)
def test_what_cannot_be_combined_is_refused_by_name(tmp_path: Path, arguments: list[str], expected: str) -> None:
    refused = run(tmp_path, *PYTHON, *SHORT, *SPLIT, *arguments)
    assert refused.returncode == 2
    assert refused.stderr.startswith(f"harness: {expected}")
    assert len(refused.stderr.splitlines()) == 1


def test_two_processes_for_another_placement_are_refused(tmp_path: Path) -> None:
    refused = run(tmp_path, *TORCHRUN, *SHORT)
    assert refused.returncode == 1
    assert "harness: placement.strategy=auto: must be tensor_parallel under torchrun" in refused.stderr
