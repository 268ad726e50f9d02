"""GPUs are dealt out: no two holders at once, none kept by the dead."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from harness.cli.gpus import lease
from harness.config.errors import SettingError

# Takes a GPU, says so, keeps it for a while, and says that it is done; ten times.
HOLDER = """
import os, sys, time
from harness.cli.gpus import lease
for _ in range(10):
    held = lease(int(sys.argv[1]))
    gpus = ",".join(held)
    print(f"{time.monotonic()} + {gpus}", flush=True)
    time.sleep(0.02)
    print(f"{time.monotonic()} - {gpus}", flush=True)
    for lock in held.values():
        os.close(lock)
"""


@pytest.fixture(autouse=True)
def three_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-0,GPU-1,GPU-2")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))


def test_no_two_hold_a_gpu_at_once() -> None:
    """Five processes that want two of three."""
    holders = [
        subprocess.Popen([sys.executable, "-c", HOLDER, "2"], stdout=subprocess.PIPE, text=True)
        for _ in range(5)
    ]
    lines = [line for holder in holders for line in holder.communicate()[0].splitlines()]
    assert len(lines) == 5 * 10 * 2
    taken: set[str] = set()
    for _, change, gpus in sorted(
        (float(at), change, gpus) for at, change, gpus in map(str.split, lines)
    ):
        for gpu in gpus.split(","):
            assert (gpu in taken) == (change == "-")
            (taken.add if change == "+" else taken.remove)(gpu)
        assert len(gpus.split(",")) == 2


def test_a_gpu_returns_from_the_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-7")
    take = "import time; from harness.cli.gpus import lease; held = lease(1)"
    holder = subprocess.Popen(
        [sys.executable, "-c", f"{take}; print('held', flush=True); time.sleep(3600)"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    held = lease(1)
    assert list(held) == ["GPU-7"]
    os.close(held["GPU-7"])


def test_a_gpu_is_held_as_long_as_the_process_that_inherits_it() -> None:
    locks = list(lease(3).values())
    worker = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(3600)"], pass_fds=locks
    )
    for lock in locks:
        os.close(lock)
    waiting = subprocess.Popen(
        [sys.executable, "-c", HOLDER, "3"], stdout=subprocess.PIPE, text=True
    )
    with pytest.raises(subprocess.TimeoutExpired):
        waiting.wait(2)
    worker.kill()
    worker.wait()
    assert len(waiting.communicate()[0].splitlines()) == 20


def test_users_of_a_machine_share_the_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can be another user for a while")
    # pytest's own directory is closed to others.
    directory = Path(tempfile.mkdtemp(dir="/tmp"))
    directory.chmod(0o777)
    monkeypatch.setattr("tempfile.tempdir", str(directory))
    held = lease(1)
    os.seteuid(65534)
    try:
        held |= lease(2)
    finally:
        os.seteuid(0)
        for lock in held.values():
            os.close(lock)
        shutil.rmtree(directory)
    assert sorted(held) == ["GPU-0", "GPU-1", "GPU-2"]


def test_more_than_there_are_and_none_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        SettingError, match="gpus_per_job=4: must not exceed the number of visible GPUs, 3"
    ):
        lease(4)
    assert lease(None) == {}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert lease(1) == {}, "a machine without GPUs has nothing to deal out"
