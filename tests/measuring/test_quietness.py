"""Was the machine quiet? What Linux and NVML tell, and what is said about it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.measuring import quietness
from harness.measuring.quietness import Quietness, processor_time


def test_processor_time_is_that_of_all_threads(tmp_path: Path) -> None:
    for thread, schedstat in (("1", "30 10 5"), ("2", "20 5 9")):
        (tmp_path / thread).mkdir()
        (tmp_path / thread / "schedstat").write_text(schedstat)
    (tmp_path / "has_ended").mkdir()
    assert processor_time(tmp_path) == (50, 15)
    assert processor_time(tmp_path / "another_system") is None


def test_what_a_run_has_started_computes_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads of a server that waits for others are those that matter."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        times = {"": (1, 2), f"/proc/{child.pid}/task": (10, 20)}
        monkeypatch.setattr(quietness, "processor_time", lambda tasks="": times.get(str(tasks)))
        assert quietness._time_of_run() == (11, 22)
        child.communicate()


def test_threads_that_have_ended_take_their_times_with_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = iter([(10, 0), (30, 80), (30, 0), (30, -1), (10, 5)])
    monkeypatch.setattr(quietness, "_time_of_run", lambda: next(times))
    watch = Quietness(())
    for share in (0.2, 1.0, None, None):
        assert watch.columns()["processor_share"] == share


class Nvml:
    """A GPU whose clock falls by heat, with a neighbour."""

    NVMLError = Exception
    NVML_CLOCK_SM = 1
    clock = 1980
    pids = (os.getpid(), 1)

    def __getattr__(self, name: str) -> Any:
        return {
            "nvmlDeviceGetHandleByUUID": lambda gpu: gpu,
            "nvmlDeviceGetClockInfo": lambda handle, kind: self.clock,
            "nvmlDeviceGetCurrentClocksThrottleReasons": lambda handle: (
                0x41 if self.clock < 1500 else 0x1
            ),
            "nvmlDeviceGetComputeRunningProcesses": lambda handle: [
                SimpleNamespace(pid=pid) for pid in self.pids
            ],
        }[name]


def test_the_worst_that_a_gpu_told(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml, watch = Nvml(), Quietness(["GPU-aaaa"])
    monkeypatch.setattr(quietness, "pynvml", nvml)
    for clock in (1980, 1200, 1980):
        nvml.clock = clock
        watch.look()
    columns = watch.columns()
    assert columns["lowest_gpu_clock_mhz"] == 1200
    assert columns["gpu_throttled"] == "temperature (hardware)"
    assert columns["num_throttled_units"] == 1
    assert columns["other_gpu_processes"] == 1


def test_processes_of_the_run_itself_are_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml()
    monkeypatch.setattr(quietness, "pynvml", nvml)

    def num_others(*pids: int) -> int | None:
        nvml.pids = (os.getpid(), *pids)
        watch = Quietness(["GPU-aaaa"])
        watch.look()
        number: int | None = watch.columns()["other_gpu_processes"]
        return number

    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as server:
        assert num_others(server.pid) == 0
        server.communicate()
    assert num_others(os.getppid()) == 1
