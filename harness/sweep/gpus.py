"""GPUs for jobs that run side by side: one lock file per GPU, held by the processes that use it."""

from __future__ import annotations

import fcntl
import os
import random
import tempfile
import time
from pathlib import Path

from harness.config.errors import SettingError
from harness.config.machine import gpu_names


def lease(num_gpus: int | None) -> dict[str, int]:
    """Wait until `num_gpus` of the visible GPUs are free, and lock them. None, or no GPU in this machine: no locks.

    Returns:
        GPU -> file descriptor of its lock, which is held until this process and those that inherit it have closed it.

    Raises:
        SettingError: if fewer are visible.
    """
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = (
        map(str, range(len(gpu_names()))) if chosen is None else map(str.strip, chosen.split(","))
    )
    visible = list(filter(None, names))
    if num_gpus is None or not visible:
        return {}
    if num_gpus > len(visible):
        raise SettingError(
            "gpus_per_job", f"must not exceed the number of visible GPUs, {len(visible)}", num_gpus
        )
    directory = Path(tempfile.gettempdir()) / "harness-gpus"
    directory.mkdir(exist_ok=True)
    while True:
        held: dict[str, int] = {}
        for gpu in visible:
            lock = os.open(directory / f"{gpu}.lock", os.O_RDONLY | os.O_CREAT, 0o666)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                continue
            held[gpu] = lock
            if len(held) == num_gpus:
                return held
        # All or nothing: two jobs that hold one GPU each and need two would wait for ever.
        for lock in held.values():
            os.close(lock)
        time.sleep(random.uniform(0.1, 0.5))
