"""Watches whether the machine is idle apart from the measurement: processor time, load, and other work of the GPUs."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pynvml

from harness.config.machine import num_usable_cores

# NVML's bits for clocks that are lowered because of heat or power, and not because the GPU is idle.
_REASONS = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "temperature (software)",
    0x40: "temperature (hardware)",
    0x80: "power brake",
}


def processor_time(tasks: Path) -> tuple[int, int] | None:
    """(ran, waited): the nanoseconds for which the threads of a process have run, and have waited for a core.

    None if the system does not report these times. (A kernel without them may report zeros.)

    Args:
        tasks: the directory of the process's threads, `/proc/PID/task`.
    """
    ran = waited = 0
    try:
        for thread in tasks.iterdir():
            # A thread may end between the two lines.
            with suppress(FileNotFoundError, ProcessLookupError):
                fields = (thread / "schedstat").read_text().split()
                ran += int(fields[0])
                waited += int(fields[1])
    except (OSError, ValueError, IndexError):
        return None
    return (ran, waited) if ran else None


def _processes_of_run() -> set[int]:
    """The ids of this process and of all its descendants, because servers that it starts do the computing."""
    pids = {os.getpid()}
    with suppress(psutil.Error):
        pids.update(child.pid for child in psutil.Process().children(recursive=True))
    return pids


def _times_of(pids: set[int]) -> dict[int, tuple[int, int]]:
    """`processor_time` of each of these processes, by its id. Processes whose times are not known are left out."""
    return {pid: time for pid in pids if (time := processor_time(Path(f"/proc/{pid}/task")))}


def load_average() -> float | None:
    """Number of programs that ran or waited for a core (on Linux also: for a disk), averaged over about the last
    minute; None if the system does not report it.
    """
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None


class Quietness:
    """Watches the machine while a run is timed, from the creation of this object on.

    It compares processor times, and keeps the worst values that NVML reported about the GPUs at any `look`.

    Args:
        gpus: UUIDs of the GPUs that compute; empty if GPUs cannot be watched.
    """

    def __init__(self, gpus: Sequence[str]) -> None:
        # At the previous look, or at the creation.
        self._times = _times_of(_processes_of_run())
        # The nanoseconds for which processes of the run have run, and have waited for a core.
        self._ran = self._waited = 0
        self._gpus = gpus
        self._lowest_clock_mhz: int | None = None
        self._throttle_reasons: set[str] = set()
        # The number of looks at which the clocks of any GPU were lowered; None before the first answer of NVML.
        self._num_throttled: int | None = None
        # The most processes of other programs that were ever seen on a single GPU; None before the first answer of
        # NVML.
        self._other_processes: int | None = None

    def look(self) -> None:
        """Read the processor times, and ask NVML about the GPUs. Call this after each timed answer of an arm, and not
        while an answer is timed. Servers may end and be started between two answers.

        NVML is initialised already: `local.models.devices.gpu_uuids` did this when it found the UUIDs. What NVML does
        not report stays as it was after the previous look.
        """
        own = _processes_of_run()
        before, self._times = self._times, _times_of(own)
        for pid, (ran, waited) in self._times.items():
            ran_before, waited_before = before.get(pid, (0, 0))
            # A thread's times disappear when it ends, so a difference may be negative.
            if ran >= ran_before and waited >= waited_before:
                self._ran += ran - ran_before
                self._waited += waited - waited_before
        reasons: set[str] = set()
        for gpu in self._gpus:
            with suppress(pynvml.NVMLError):
                handle = pynvml.nvmlDeviceGetHandleByUUID(gpu)
                clock = pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)
                self._lowest_clock_mhz = min(clock, self._lowest_clock_mhz or clock)
                running = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
                num_others = len({process.pid for process in running} - own)
                self._other_processes = max(num_others, self._other_processes or 0)
                bits = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
                self._num_throttled = self._num_throttled or 0
                reasons.update(name for bit, name in _REASONS.items() if bits & bit)
        self._throttle_reasons |= reasons
        if reasons:
            self._num_throttled = (self._num_throttled or 0) + 1

    @functools.cached_property
    def columns(self) -> dict[str, Any]:
        """The columns of `MachineFigures`, by name; None for unknown values.

        They are computed once, at the first use, so that all rows of a run are equal. They are for the time from the
        creation of this object to the last look.
        """
        requested = self._ran + self._waited
        return {
            # CPU time received / CPU time requested.
            "processor_share": self._ran / requested if requested else None,
            "load": load_average(),
            "num_cores": num_usable_cores(),
            "other_gpu_processes": self._other_processes,
            "lowest_gpu_clock_mhz": self._lowest_clock_mhz,
            "gpu_throttled": ", ".join(sorted(self._throttle_reasons)) or None,
            # There is one look per answer of an arm, so this counts answers.
            "num_throttled_units": self._num_throttled,
        }
