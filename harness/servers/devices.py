"""Finds the devices on which a server computes, as far as this machine shows them; never devices that are merely
here.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pynvml

from harness.config.machine import cpu_name, is_loopback

# Linux's files of GPUs and other accelerators. A process that computes on one has its file open.
_ACCELERATOR = re.compile(r"/dev/(nvidia\d|dri/renderD|kfd|dxg|accel)")


def devices_of(url: str, starter: int | None) -> list[str]:
    """Names of the GPUs on which processes of a server compute, or of the processor if they are known to use no GPU.

    Empty if that cannot be seen: for a server on another machine, in a container, or of another user.

    Args:
        url: address of its API.
        starter: id of the process that started it for the harness; None for a server that ran already.
    """
    address = urlsplit(url)
    if not is_loopback(address.hostname or ""):
        return []
    processor = [cpu_name() or "unknown CPU"]
    if starter is not None and sys.platform == "darwin":
        # The GPU is on the same chip.
        return processor
    try:
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
        # Other processes that listen on the port may only pass requests on, to a container or another machine.
        is_all = bool(listening) and set(listening) <= set(started)
        may_use_gpus = not is_all or any(_holds_accelerator(process.pid) for process in processes)
    except (psutil.Error, OSError):
        return []
    return gpus if gpus or may_use_gpus else processor


def _gpus_of(pids: Collection[int]) -> list[str]:
    """Names of the NVIDIA GPUs on which any of these processes computes, with CUDA or Vulkan."""
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


def _holds_accelerator(pid: int) -> bool:
    files = Path(f"/proc/{pid}/fd").iterdir()
    return any(_ACCELERATOR.match(str(file.readlink())) for file in files)
