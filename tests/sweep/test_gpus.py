"""GPUs are dealt out: no two holders at once, none kept by the dead."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.config.errors import SettingError
from harness.sweep.gpus import lease

# Takes a GPU, says so, keeps it for a while, and says that it is done; ten times.
HOLDER = """
import sys, time
from harness.sweep.gpus import lease
for _ in range(10):
    held = lease(int(sys.argv[1]))
    gpus = held.variables["CUDA_VISIBLE_DEVICES"]
    print(f"{time.monotonic()} + {gpus}", flush=True)
    time.sleep(0.02)
    print(f"{time.monotonic()} - {gpus}", flush=True)
    held.release()
"""


@pytest.fixture(autouse=True)
def three_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))


@pytest.mark.parametrize("num_gpus", [1, 2])
def test_no_two_hold_a_gpu_at_once(num_gpus: int) -> None:
    holders = [
        subprocess.Popen([sys.executable, "-c", HOLDER, str(num_gpus)], stdout=subprocess.PIPE, text=True)
        for _ in range(5)
    ]
    lines = [line for holder in holders for line in holder.communicate(timeout=60)[0].splitlines()]
    assert len(lines) == 5 * 10 * 2
    taken: set[str] = set()
    for _, change, gpus in sorted((float(at), change, gpus) for at, change, gpus in map(str.split, lines)):
        for gpu in gpus.split(","):
            assert (gpu in taken) == (change == "-")
            (taken.add if change == "+" else taken.remove)(gpu)
        assert len(gpus.split(",")) == num_gpus


def test_a_gpu_returns_from_the_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    script = (
        "import time; from harness.sweep.gpus import lease; held = lease(1); print('held', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    started = time.monotonic()
    held = lease(1)
    assert held.variables == {"CUDA_VISIBLE_DEVICES": "7"}
    assert time.monotonic() - started < 30
    held.release()


def test_more_than_there_are_and_none_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingError, match="gpus_per_job=4: must not exceed the number of visible GPUs, 3"):
        lease(4)
    assert lease(None).variables == {}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert lease(1).variables == {}, "a machine without GPUs has nothing to deal out"
