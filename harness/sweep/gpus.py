"""GPUs dealt out among jobs that run side by side: a lock file a GPU, held for as long as it is used."""

from __future__ import annotations

import os
import random
import tempfile
import time
from pathlib import Path

import filelock

from harness.config.errors import SettingError
from harness.results.environment import gpu_names


class Lease:
    """GPUs that nobody else has, until they are released or this process ends.

    Attributes:
        variables: environment variables that show these GPUs alone.
    """

    def __init__(self, locks: dict[str, filelock.BaseFileLock]) -> None:
        self._locks = locks
        self.variables = {"CUDA_VISIBLE_DEVICES": ",".join(locks)} if locks else {}

    def release(self) -> None:
        """Give the GPUs back."""
        for lock in self._locks.values():
            lock.release()
        self._locks = {}


def lease(num_gpus: int | None) -> Lease:
    """Wait until `num_gpus` of the visible GPUs are free, and take them; None, or a machine without GPUs, takes none.

    Raises:
        SettingError: if more are wanted than are visible.
    """
    visible = _visible()
    if num_gpus is None or not visible:
        return Lease({})
    if num_gpus > len(visible):
        raise SettingError("gpus_per_job", f"must not exceed the number of visible GPUs, {len(visible)}", num_gpus)
    while True:
        held: dict[str, filelock.BaseFileLock] = {}
        for gpu in visible:
            lock = filelock.FileLock(_directory() / f"{gpu}.lock", mode=0o666)
            try:
                lock.acquire(timeout=0)
            except filelock.Timeout:
                continue
            held[gpu] = lock
            if len(held) == num_gpus:
                return Lease(held)
        # All or nothing: two jobs that hold one GPU each and want two would wait for ever.
        Lease(held).release()
        time.sleep(random.uniform(0.1, 0.5))


def _visible() -> list[str]:
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return [str(index) for index in range(len(gpu_names()))]
    return [device.strip() for device in chosen.split(",") if device.strip()]


def _directory() -> Path:
    directory = Path(tempfile.gettempdir()) / "harness-gpus"
    directory.mkdir(exist_ok=True)
    return directory
