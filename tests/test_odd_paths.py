"""Directories whose names hold what Hydra's grammar has for itself, in every setting that is a path."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from harness.config.sizes import PACKAGE
from in_process import Harness

ODD = "odd é=#(~) x"


def test_a_run_reads_and_writes_there(
    harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    model = tmp_path / ODD / "mödel=1"
    shutil.copytree(PACKAGE / "local" / "models" / "shipped" / "tiny_draft", model)
    (tmp_path / ODD / "p.txt").write_text("Once\nTwice\n")
    pair = [f"model={ODD}/mödel=1", f"draft=./{ODD}/mödel=1", f"prompts={ODD}/p.txt"]
    quick = ["num_prompts=2", "decoding.max_new_tokens=4"]
    outcome = harness(
        "latency", *pair, *quick, "results.file=~/x=1.csv", f"hydra.run.dir={ODD}/run,1"
    )
    assert f"{ODD}/mödel=1 + mödel=1" in outcome.stdout
    assert (tmp_path / "home" / "x=1.csv").exists()
    assert not (tmp_path / "~").exists()
    assert (tmp_path / ODD / "run,1" / "latency.csv").exists()
    # What Hydra notes can be given to it again.
    noted = (tmp_path / ODD / "run,1" / ".hydra" / "overrides.yaml").read_text()
    assert f"model='{ODD}/mödel=1'" in noted


def test_a_sweep_takes_several_of_them(harness: Harness, tmp_path: Path) -> None:
    for name in ("a=1", "b#2"):
        shutil.copytree(
            PACKAGE / "local" / "models" / "shipped" / "tiny_draft", tmp_path / ODD / name
        )
    outcome = harness("plan", "-m", f"model={ODD}/a=1,{ODD}/b#2", f"hydra.sweep.dir={ODD}/sweep")
    assert "2 of 2 jobs" in outcome.stdout + outcome.stderr
    assert (tmp_path / ODD / "sweep" / "plan.csv").exists()
