"""Finds the devices on which a server computes, as far as this machine shows them. Devices that this machine merely has
do not count.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pynvml

from harness.config.machine import cpu_name, is_loopback

# The device files of GPUs and other accelerators on Linux. A process that computes on an accelerator has its file open.
_ACCELERATOR = re.compile(r"/dev/(nvidia\d|dri/renderD|kfd|dxg|accel)")


def devices_of(url: str, starter: int | None) -> list[str]:
    """The names of the GPUs on which a server's processes compute, or the name of the processor if they are known to
    use no GPU.

    Empty if this cannot be found out: for a server on another machine, in a container, or of another user, for an
    address without a port, and for a server that was already running and uses no GPU.

    Args:
        url: address of the server's API.
        starter: id of the process through which harness started the server (the guard); None for a server that was
            already running.
    """
    address = urlsplit(url)
    if not is_loopback(address.hostname or ""):
        return []
    processor = [cpu_name() or "unknown CPU"]
    if starter is not None and sys.platform == "darwin":
        # On Macs, processor and GPU are one chip, so its name says both, whichever of them computes.
        return processor
    try:
        # Processes that the guard started, and processes that listen on the server's port. The two may differ.
        started = [] if starter is None else psutil.Process(starter).children(recursive=True)
        listening = [
            psutil.Process(connection.pid)
            for connection in psutil.net_connections("tcp")
            if connection.pid
            and connection.status == psutil.CONN_LISTEN
            and connection.laddr.port == address.port
        ]
        processes = {*started, *listening}
        for process in listening:
            processes.update(process.children(recursive=True))
        gpus = _gpus_of({process.pid for process in processes})
        if gpus:
            return gpus
        # A process on the port that harness did not start may only forward requests, to a container or to another
        # machine.
        all_started_here = bool(listening) and set(listening) <= set(started)
        # `realpath` does not fail if a file is closed meanwhile.
        may_use_gpus = not all_started_here or any(
            _ACCELERATOR.match(os.path.realpath(file))
            for process in processes
            for file in Path(f"/proc/{process.pid}/fd").iterdir()
        )
    except (psutil.Error, OSError):
        return []
    return [] if may_use_gpus else processor


def _gpus_of(pids: Collection[int]) -> list[str]:
    """The names of the NVIDIA GPUs on which any of these processes computes, with CUDA or Vulkan."""
    names = []
    with suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            running = [*pynvml.nvmlDeviceGetComputeRunningProcesses(handle)]
            # Older drivers and bindings cannot list these processes.
            with suppress(pynvml.NVMLError, AttributeError):
                running += pynvml.nvmlDeviceGetGraphicsRunningProcesses(handle)
            if any(process.pid in pids for process in running):
                names.append(pynvml.nvmlDeviceGetName(handle))
    return names
