"""Sweeps through Hydra's own launchers, with the presets that we ship."""

from __future__ import annotations

import importlib.util
import os
import signal
from pathlib import Path
from subprocess import CompletedProcess

import pandas as pd
import psutil
import pytest

from harness.config.machine import num_usable_cores
from in_process import Harness
from processes import run, start
from wording import mentions

NUM_CORES = num_usable_cores()
FATAL = 7
# Of the simulated engine: a run that does not end while a test lasts.
LONG = ["num_prompts=15", "num_warmup=100000", "decoding.max_new_tokens=2000"]
# An engine that ends its process at one K, and whose runner says how many cores it has. It needs no torch.
DEADLY = f"""
import os, signal
from harness.engines.simulated.record import Simulated


class Deadly(Simulated):
    name = "deadly"

    def open(self, opening):
        if opening.settings.decoding.num_draft_tokens == {FATAL}:
            os.kill(os.getpid(), signal.SIGKILL)
        engine = super().open(opening)
        engine.runner = os.environ["OMP_NUM_THREADS"]
        return engine
"""


def sweep(directory: Path, *arguments: str) -> tuple[CompletedProcess[str], pd.DataFrame]:
    (directory / "deadly.py").write_text(DEADLY)
    deadly = [f"engine={directory}/deadly.py:Deadly", "num_prompts=2", "num_warmup=0"]
    result = run("latency", "-m", *deadly, *arguments, cwd=directory, code=None)
    newest = max((directory / "multirun" / "latency").glob("*/*/latency.csv"))
    return result, pd.read_csv(newest)


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
    assert "ray" in plugin or set(rows["runner"].dropna()) == {max(1, NUM_CORES // 2)}, (
        "they share the cores"
    )


@pytest.mark.slow
def test_a_job_that_reaches_its_time_limit_keeps_its_rows(tmp_path: Path) -> None:
    """Submitit's signal comes to the process that it started, and not to that of the user."""
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    preset = ["+launcher=submitit_local", "hydra.launcher.timeout_min=5"]
    # As Slurm's preset has it: a job that was timed out is not put back into the queue.
    preset += ["+hydra.launcher.max_num_timeout=0"]
    endless = ["engine=simulated", *LONG]
    sweep = start("latency", "-m", *preset, *endless, cwd=tmp_path, until="**/0/environment.json")
    descendants = psutil.Process(sweep.pid).children(recursive=True)
    jobs = [one for one in descendants if "submitit.core._submit" in one.cmdline()]
    assert len(jobs) == 1
    jobs[0].send_signal(signal.SIGUSR2)
    printed = sweep.communicate()
    assert sweep.returncode == 1, printed
    (file,) = tmp_path.glob("multirun/latency/*/*/latency.csv")
    rows = pd.read_csv(file)
    assert {*rows["status"]} == {"interrupted"}
    assert {*rows["error"]} == {"time limit: stopped by SIGUSR2"}


def test_jobs_without_a_row_are_a_failure(tmp_path: Path) -> None:
    """A variable that only their cluster would set."""
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    file = "results.file=results/${oc.env:NEVER_SET}.csv"
    arguments = ["+launcher=submitit_local", "engine=simulated", file, "seed=1,2"]
    result = run("latency", "-m", *arguments, cwd=tmp_path, code=1)
    assert mentions(result.stderr, "2 jobs wrote no row", ".submitit")
    assert "UserWarning" not in result.stderr


def test_a_sweep_that_cannot_begin_is_a_failure(
    harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launcher's other processes have the error, not this one."""
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "latency.csv").write_text("mine\n1\n")
    monkeypatch.setattr("harness.cli.main._Invocation.run_job", lambda invocation, config: None)
    outcome = harness("latency", "-m", "hydra.sweep.dir=sweep", "seed=1,2", code=1)
    assert "the sweep could not begin" in outcome.complaint


def test_a_file_of_each_job_is_named_by_what_only_jobs_know(
    harness: Harness, tmp_path: Path
) -> None:
    """Without a launcher the sweep is refused, and not half begun."""
    file = "results.file=results/${oc.env:NEVER_SET}.csv"
    assert "NEVER_SET" in harness("latency", "-m", file, "seed=1,2", code=2).complaint


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


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
def test_a_launcher_that_is_not_installed_is_named_with_what_brings_it(harness: Harness) -> None:
    complaint = harness.refused("latency", "-m", "+launcher=ray", "seed=1,2")
    absent = "hydra/launcher=ray: is not installed; pip install 'specharness[ray,slurm]'"
    assert complaint.startswith(absent)
