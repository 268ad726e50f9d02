"""Sweeps through Hydra's own launchers, with the presets that we ship."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pandas as pd
import pytest

import forked
from harness.config.machine import num_usable_cores
from in_process import Harness
from processes import run
from sweep_pairs import FATAL_WIDTH, save_wicked

FATAL = FATAL_WIDTH - 1
NUM_CORES = num_usable_cores()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    directory = tmp_path_factory.mktemp("pair")
    for name in ("none", "kill"):
        save_wicked(directory / name, name)
    (directory / "prompts.txt").write_text("one\ntwo words\n")
    return [
        *(f"model={directory}/none", f"draft={directory}/none", f"prompts={directory}/prompts.txt"),
        *("model.trust_remote_code=true", "draft.trust_remote_code=true"),
        *("num_prompts=2", "num_warmup=0", "decoding.max_new_tokens=12"),
    ]


def sweep(
    directory: Path, *arguments: str, run: Callable[..., CompletedProcess[str]] = run
) -> tuple[CompletedProcess[str], pd.DataFrame]:
    result = run(
        "latency", "-m", *arguments, cwd=directory, code=None, HF_HOME=str(directory / "hub")
    )
    files = list((directory / "multirun" / "latency").glob("*/*/latency.csv"))
    assert len(files) == 1, result.stderr
    return result, pd.read_csv(files[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plugin", "preset", "run"),
    [
        # Those of joblib and Ray go on behind a fork, which ends without cleaning up.
        ("hydra_joblib_launcher", ["+launcher=joblib", "hydra.launcher.n_jobs=2"], run),
        ("hydra_submitit_launcher", ["+launcher=submitit_local"], forked.run),
        ("hydra_ray_launcher", ["+launcher=ray", "+hydra.launcher.ray.init.num_cpus=2"], run),
    ],
    ids=["joblib", "submitit", "ray"],
)
def test_a_killed_job_is_a_row_and_the_others_run(
    pair: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    plugin: str,
    preset: list[str],
    run: Callable[..., CompletedProcess[str]],
) -> None:
    pytest.importorskip(f"hydra_plugins.{plugin}")
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(variable)
    pair = [pair[0].replace("/none", "/kill"), *pair[1:]]
    result, rows = sweep(tmp_path, *preset, *pair, f"decoding.num_draft_tokens=2,{FATAL}", run=run)
    assert result.returncode == 1, result.stderr
    speculative = rows[rows["arm"] == "speculative"].set_index("num_draft_tokens")
    assert dict(speculative["status"]) == {2: "ok", FATAL: "failed"}
    assert "its process was killed by SIGKILL" in speculative["error"][FATAL]
    assert "2 of 2 jobs" in result.stderr
    assert "ray" in plugin or set(rows["num_threads"].dropna()) == {max(1, NUM_CORES // 2)}, (
        "they share the cores"
    )
    if "joblib" in plugin:
        # The number of threads determines the figures; it is known before a job runs, and here none does.
        (tmp_path / "again").mkdir()
        one = ["decoding.num_draft_tokens=2", f"results.file={tmp_path}/results/latency.csv"]
        _, again = sweep(tmp_path / "again", *preset, *pair, *one, run=forked.run)
        assert set(again["run"]) == set(rows["run"][rows["status"] == "ok"])


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
def test_a_launcher_that_is_not_installed_is_named_with_what_brings_it(harness: Harness) -> None:
    complaint = harness.refused("latency", "-m", "+launcher=ray", "seed=1,2")
    absent = "hydra/launcher=ray: is not installed; pip install 'specharness[ray]' brings it"
    assert complaint == absent
