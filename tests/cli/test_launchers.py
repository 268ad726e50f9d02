"""Sweeps through Hydra's own launchers, with the presets that we ship."""

import os
import signal
from pathlib import Path
from subprocess import CompletedProcess

import pandas as pd
import pytest

from harness.config.machine import num_usable_cores
from in_process import Harness
from processes import run, start
from wicked_engine import FATAL, FILE
from wording import mentions

NUM_CORES = num_usable_cores()


def sweep(directory: Path, *arguments: str) -> tuple[CompletedProcess[str], pd.DataFrame]:
    killed = [f"engine={FILE}:Killed", "num_prompts=2", "num_warmup=0"]
    result = run("latency", "-m", *killed, *arguments, cwd=directory, code=None)
    newest = max((directory / "multirun" / "latency").glob("*/*/latency.csv"))
    return result, pd.read_csv(newest)


def test_an_own_launcher_has_the_words_of_its_cluster(harness: Harness, tmp_path: Path) -> None:
    file = tmp_path / "mine" / "launcher" / "ours.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(
        "# @package _global_\n"
        "defaults: [override /hydra/launcher: submitit_slurm]\n"
        "hydra: {launcher: {partition: gpu-a, setup: [module load cuda]}}\n"
    )
    shown = harness("latency", "--config-dir", "mine", "+launcher=ours", "--cfg", "hydra").stdout
    assert "module load cuda" in shown
    refused = harness.refused("latency", "--config-dir", "mine", "+launcher=ours", "K=6")
    assert refused == "+launcher: starts the jobs of a sweep: type -m, also for one job"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plugin", "preset"),
    [
        ("hydra_submitit_launcher", ["+launcher=submitit_local"]),
        ("hydra_ray_launcher", ["+launcher=ray", "+hydra.launcher.ray.init.num_cpus=2"]),
    ],
    ids=["submitit", "ray"],
)
def test_a_killed_job_is_a_row_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plugin: str, preset: list[str]
) -> None:
    pytest.importorskip(f"hydra_plugins.{plugin}")
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(variable)
    file = f"results.file={tmp_path}/results/latency.csv"
    result, rows = sweep(tmp_path, *preset, file, f"K=2,{FATAL}")
    assert result.returncode == 1, result.stderr
    speculative = rows[rows["arm"] == "speculative"].set_index("num_draft_tokens")
    assert dict(speculative["status"]) == {2: "ok", FATAL: "failed"}
    assert "its process was killed by SIGKILL" in speculative["error"][FATAL]
    assert "2 of 2 jobs" in result.stderr
    # They share the cores. Ray gives each its own.
    assert ("jobs run at the same time on this machine" in result.stderr) == ("ray" not in plugin)
    assert "ray" in plugin or set(rows["runner"].dropna()) == {max(1, NUM_CORES // 2)}


def test_ctrl_c_while_slurm_has_the_jobs_calls_none_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Submitit waits for a job that a `sbatch` of this test accepts and never runs."""
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    programs = {"sbatch": "echo Submitted batch job 17", "srun": "", "sacct": "sleep 0.01"}
    for name, line in programs.items():
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/sh\n{line}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    sweep = start(
        "latency", "-m", "+launcher=slurm", "engine=simulated", "seed=1,2",
        cwd=tmp_path, until="multirun/latency/*/*/.submitit/17_1/*_submitted.pkl",
    )  # fmt: skip
    sweep.send_signal(signal.SIGINT)
    _, printed = sweep.communicate()
    assert sweep.returncode == 130
    assert mentions(printed, "0 of 2 jobs")
    assert "wrote no row" not in printed, "they go on"
