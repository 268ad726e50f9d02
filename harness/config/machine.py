"""Facts about this machine: the names of its processor and GPUs, and how many cores may be used.

No function starts CUDA in this process. A fact that is unknown is None or empty, because describing a run must never
make the run fail.
"""

from __future__ import annotations

import functools
import ipaddress
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath

import psutil
import pynvml

# The environment variable by which a sweep gives its processes the number of threads of its first job. Unlike
# OMP_NUM_THREADS, it is not part of a measurement's identity.
SWEEP_THREADS = "HARNESS_SWEEP_THREADS"
# This file exists if the driver of NVIDIA's GPUs is running.
_DRIVER = Path("/dev/nvidiactl")
_PRINT_GPUS = """
import torch
for index in range(torch.cuda.device_count()):
    print(torch.cuda.get_device_name(index))
"""


@functools.cache
def cpu_name() -> str | None:
    """Return the model name of the processor, `AMD EPYC 7763 64-Core Processor`; None if it is unknown."""
    try:
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    except OSError:
        if sys.platform == "darwin":
            return _of_mac()
    return platform.processor() or None


def gpu_names() -> list[str]:
    """Return the names of the GPUs that this process may use, in the order of CUDA_VISIBLE_DEVICES or, if it is not
    set, of the driver; empty if there are none.

    An index in CUDA_VISIBLE_DEVICES is taken for the driver's number of a GPU. If a machine has different GPUs, CUDA
    numbers them in another order, unless CUDA_DEVICE_ORDER=PCI_BUS_ID is set.

    An entry of CUDA_VISIBLE_DEVICES is returned unchanged if it is a GPU's UUID, or if the driver's names are unknown.
    The rest of the list after an entry that names no GPU is ignored, as CUDA does.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = _all_gpus()
    if visible is None:
        return names
    # If there are GPUs without known names, an index in CUDA_VISIBLE_DEVICES is used as a name.
    are_nameless = not names and _DRIVER.exists()
    chosen = []
    for device in visible.split(","):
        device = device.strip()
        is_index = device.isdecimal()
        if is_index and int(device) < len(names):
            chosen.append(names[int(device)])
        elif device.startswith(("GPU-", "MIG-")) or (is_index and are_nameless):
            chosen.append(device)
        else:
            # For CUDA, an entry that names no GPU ends the list. So -1 and NoDevFiles hide all GPUs.
            break
    return chosen


def num_usable_cores() -> int:
    """Return how many cores this process may keep busy: all that it may use, or fewer if its cgroup has a quota."""
    visible = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        # The cores on which this process may run.
        visible = len(os.sched_getaffinity(0))
    # With more threads than the quota allows, the kernel would stop all of them for the rest of each period.
    return max(1, min(visible, int(cpu_quota() or sys.maxsize)))


def is_loopback(host: str) -> bool:
    """Return whether a host is `localhost` or a loopback address, which means this machine. Names are not looked up."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def num_free_cores() -> int:
    """Return how many of the usable cores are idle at this moment, at least one. Takes 0.2 s."""
    busy_percent = psutil.cpu_percent(0.2, percpu=True)
    visible: Iterable[int] = range(len(busy_percent))
    if hasattr(os, "sched_getaffinity"):
        visible = os.sched_getaffinity(0) & set(visible)
    idle = sum(1 - busy_percent[core] / 100 for core in visible)
    return max(1, min(num_usable_cores(), round(idle)))


def share_cores(num_processes: int) -> None:
    """Limit the threads of this process, and of processes that it starts, to a share of the usable cores.

    With 16 cores and 4 processes, each process gets 4 threads. The function sets OMP_NUM_THREADS, which torch reads
    when it is imported. If the user has set OMP_NUM_THREADS, nothing changes.

    Args:
        num_processes: number of processes that compute at the same time, each with the same share.
    """
    if num_processes > 1 and not threads_are_set():
        os.environ["OMP_NUM_THREADS"] = str(max(1, num_usable_cores() // num_processes))


def threads_are_set() -> bool:
    """Return whether the number of threads for computing on the CPU is already set."""
    return bool(os.environ.get("OMP_NUM_THREADS"))


def output_of(
    command: Sequence[str], variables: Mapping[str, str] | None = None, limit_s: int = 10
) -> str | None:
    """Return the output of a program; None if the program does not exist, fails, or takes longer than the limit.

    Args:
        variables: the program's whole environment; None for that of this process.
    """
    null = subprocess.DEVNULL
    try:
        printed = subprocess.check_output(
            command, env=variables, stdin=null, stderr=null, timeout=limit_s
        )
        return printed.decode(errors="replace").strip()
    except (OSError, subprocess.SubprocessError):
        return None


@functools.cache
def _all_gpus() -> list[str]:
    """Return the names of this machine's GPUs, whether this process may use them or not; empty if there are none, or
    their names are unknown.
    """
    try:
        pynvml.nvmlInit()
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        return [pynvml.nvmlDeviceGetName(handle) for handle in handles]
    except pynvml.NVMLError:
        pass
    if not _DRIVER.exists():
        return []
    # In a container, the driver's management library may be missing. torch finds GPUs without that library, but it
    # starts CUDA, so it runs in another process.
    variables = dict(os.environ)
    variables.pop("CUDA_VISIBLE_DEVICES", None)
    printed = output_of([sys.executable, "-c", _PRINT_GPUS], variables, limit_s=120)
    return [] if printed is None else printed.splitlines()


def _of_mac() -> str | None:
    """Return the processor of a Mac: `Apple M4 Max, 16 cores`. The number of cores distinguishes two products that have
    the same name. None if the name is unknown.
    """
    name = output_of(["sysctl", "-n", "machdep.cpu.brand_string"])
    cores = output_of(["sysctl", "-n", "hw.physicalcpu"])
    return f"{name}, {cores} cores" if name and name.startswith("Apple") and cores else name


def cpu_quota(
    root: Path = Path("/sys/fs/cgroup"), groups: Path = Path("/proc/self/cgroup")
) -> float | None:
    """Return the CPU time per second, in cores, that the cgroups (version 1 or 2) of this process allow; None without a
    limit.

    Args:
        root: the directory in which the kernel shows all cgroups.
        groups: the file that lists the cgroups of this process.
    """
    limits = []
    for line in _text(groups).splitlines():
        # `0::/user.slice` in version 2, `4:cpu,cpuacct:/user.slice` in version 1.
        _, controllers, path = line.split(":", 2)
        is_version_1 = controllers != ""
        if is_version_1 and "cpu" not in controllers.split(","):
            continue
        # A group's limit also holds for the groups inside it. In a container, only the outermost group may be visible.
        for group in (PurePosixPath(path), *PurePosixPath(path).parents):
            name = group.relative_to("/")
            if is_version_1:
                folder = root / "cpu" / name
                quota = _text(folder / "cpu.cfs_quota_us")
                period = _text(folder / "cpu.cfs_period_us")
            else:
                quota, _, period = _text(root / name / "cpu.max").partition(" ")
            # `max`, or -1 in version 1, means that there is no limit.
            if quota.isdigit() and period.isdigit() and int(period) > 0:
                limits.append(int(quota) / int(period))
    return min(limits, default=None)


def _text(file: Path) -> str:
    """Return the text of a file, without white space around it; empty if the file cannot be read."""
    try:
        return file.read_text(errors="replace").strip()
    except OSError:
        return ""
