"""Was the machine quiet while it measured? Processor, load, and what else the GPUs do."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pynvml

from harness.config.machine import num_usable_cores

# NVML's bits for clocks that are lowered because of heat or power, not because the GPU idles.
_REASONS = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "temperature (software)",
    0x40: "temperature (hardware)",
    0x80: "power brake",
}


def processor_time(tasks: Path = Path("/proc/self/task")) -> tuple[int, int] | None:
    """Nanoseconds in which threads of a process ran so far, and in which they waited for a core; None where the
    system does not report them.
    """
    ran = waited = 0
    try:
        for thread in tasks.iterdir():
            # A thread may end meanwhile.
            with suppress(FileNotFoundError, ProcessLookupError):
                fields = (thread / "schedstat").read_text().split()
                ran += int(fields[0])
                waited += int(fields[1])
    except (OSError, ValueError, IndexError):
        return None
    return (ran, waited) if ran else None


def _time_of_run() -> tuple[int, int] | None:
    """`processor_time` of this process and of all that it has started: servers compute in its place."""
    times = [processor_time()]
    with suppress(psutil.Error):
        children = psutil.Process().children(recursive=True)
        times += [processor_time(Path(f"/proc/{child.pid}/task")) for child in children]
    pairs = [time for time in times if time is not None]
    return (sum(ran for ran, _ in pairs), sum(waited for _, waited in pairs)) if pairs else None


def load_average() -> float | None:
    """Programs that ran or waited for a core, on average over the last minute."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None


def _throttle_reasons(handle: Any) -> list[str]:
    """Why the clocks of a GPU are lowered now; none where that is not known."""
    try:
        bits = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    except pynvml.NVMLError:
        return []
    return [name for bit, name in _REASONS.items() if bits & bit]


def _num_others(pids: set[int]) -> int:
    """The number of these processes that do not belong to this run.

    A server that the run starts is its descendant.
    """
    others = pids - {os.getpid()}
    if not others:
        return 0  # nothing is to be looked up
    with suppress(psutil.Error):
        others -= {child.pid for child in psutil.Process().children(recursive=True)}
    return len(others)


class Quietness:
    """Watches the machine from its creation on, while a run is timed: processor time, and the worst of what NVML
    reported about GPUs at several times.

    Args:
        gpus: UUIDs of those that compute.
    """

    def __init__(self, gpus: Sequence[str]) -> None:
        self._first = _time_of_run()
        self._gpus = gpus
        self._lowest_clock_mhz: int | None = None
        self._throttle_reasons: set[str] = set()
        self._num_throttled = 0
        # The most processes of others that were seen on any one GPU.
        self._other_processes: int | None = None

    def look(self) -> None:
        """Look at the GPUs by NVML, which `gpu_uuids` has begun. Called between two timed answers."""
        reasons: set[str] = set()
        for gpu in self._gpus:
            with suppress(pynvml.NVMLError):
                handle = pynvml.nvmlDeviceGetHandleByUUID(gpu)
                clock = pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)
                self._lowest_clock_mhz = min(clock, self._lowest_clock_mhz or clock)
                reasons.update(_throttle_reasons(handle))
                running = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
                num_others = _num_others({process.pid for process in running})
                self._other_processes = max(num_others, self._other_processes or 0)
        self._throttle_reasons |= reasons
        self._num_throttled += bool(reasons)

    def columns(self) -> dict[str, Any]:
        """The columns about the machine since the creation."""
        return {
            "processor_share": self.processor_share,
            "load": load_average(),
            "num_cores": num_usable_cores(),
            "other_gpu_processes": self._other_processes,
            "lowest_gpu_clock_mhz": self._lowest_clock_mhz,
            "gpu_throttled": ", ".join(sorted(self._throttle_reasons)) or None,
            "num_throttled_units": self._num_throttled if self._gpus else None,
        }

    @property
    def processor_share(self) -> float | None:
        """CPU time received / requested since the creation; None where the system does not say."""
        now = _time_of_run()
        if now is None or self._first is None:
            return None
        ran, waited = (after - before for before, after in zip(self._first, now, strict=True))
        # Times of threads that have ended drop out, so that a difference may be negative.
        return ran / (ran + waited) if ran > 0 and waited >= 0 else None
