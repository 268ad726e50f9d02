"""How many cores may be used, and who shares them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.config import machine

VISIBLE = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cgroup(directory: Path, groups: str, files: dict[str, str]) -> dict[str, Path]:
    """A cgroup file system; the arguments of `cpu_quota` for it."""
    for name, text in files.items():
        file = directory / "fs" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    (directory / "groups").write_text(groups)
    return {"root": directory / "fs", "groups": directory / "groups"}


@pytest.mark.parametrize(
    ("groups", "files", "quota"),
    [
        pytest.param("0::/\n", {"cpu.max": "150000 100000"}, 1.5, id="container"),
        pytest.param("0::/\n", {"cpu.max": "max 100000"}, None, id="unlimited"),
        pytest.param("0::/\n", {}, None, id="root group"),
        pytest.param(
            "0::/a/b\n", {"a/b/cpu.max": "max 100000", "a/cpu.max": "200000 50000", "cpu.max": "max 100000"}, 4.0,
            id="limit of an outer group",
        ),
        pytest.param("0::/a/b\n", {"a/b/cpu.max": "100000 100000", "a/cpu.max": "300000 100000"}, 1.0, id="least"),
        pytest.param(
            "3:memory:/m\n2:cpu,cpuacct:/docker/x\n0::/\n",
            {"cpu/cpu.cfs_quota_us": "250000", "cpu/cpu.cfs_period_us": "100000"}, 2.5,
            id="version 1",
        ),
        pytest.param(
            "2:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None,
            id="version 1, unlimited",
        ),
    ],
)  # fmt: skip
def test_the_quota_is_that_of_the_tightest_group(
    tmp_path: Path, groups: str, files: dict[str, str], quota: float | None
) -> None:
    assert machine.cpu_quota(**cgroup(tmp_path, groups, files)) == quota


def test_where_there_are_no_cgroups_there_is_no_quota(tmp_path: Path) -> None:
    assert machine.cpu_quota(tmp_path, tmp_path / "cgroup") is None


@pytest.mark.parametrize(("quota", "cores"), [(None, 64), (64.0, 64), (3.9, 3), (0.5, 1)])
def test_a_quota_counts_like_missing_cores(monkeypatch: pytest.MonkeyPatch, quota: float | None, cores: int) -> None:
    monkeypatch.setattr(machine, "_num_visible_cores", lambda: 64)
    monkeypatch.setattr(machine, "cpu_quota", lambda: quota)
    assert machine.num_usable_cores() == cores


def test_processes_side_by_side_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(machine, "_shared", None)
    monkeypatch.setattr(machine, "_num_visible_cores", lambda: 16)
    monkeypatch.setattr(machine, "cpu_quota", lambda: None)
    for num_processes, expected in ((4, "4"), (32, "1"), (1, None)):
        machine.share_cores(num_processes)
        assert os.environ.get("OMP_NUM_THREADS") == expected
    monkeypatch.setattr(machine, "cpu_quota", lambda: 8.0)
    for num_processes, expected in ((2, "4"), (1, "8")):
        machine.share_cores(num_processes)
        assert os.environ.get("OMP_NUM_THREADS") == expected


def test_a_number_that_the_user_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_shared", None)
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    machine.share_cores(64)
    assert os.environ["OMP_NUM_THREADS"] == "5"


@pytest.mark.skipif(VISIBLE < 2, reason="one core cannot be shared")
def test_torch_computes_with_the_share() -> None:
    script = (
        "from harness.config.machine import share_cores; share_cores(2); import torch; print(torch.get_num_threads())"
    )
    without = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    result = subprocess.run([sys.executable, "-c", script], env=without, capture_output=True, text=True, check=True)
    assert int(result.stdout) == VISIBLE // 2
