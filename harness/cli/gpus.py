"""GPUs for jobs that run side by side: one lock file per GPU, held by the processes that use it."""

from __future__ import annotations

import fcntl
import os
import random
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from harness.config.errors import SettingError
from harness.config.machine import gpu_names


def lease(num_gpus: int | None) -> dict[str, int]:
    """Wait until `num_gpus` of the visible GPUs are free, and lock them.

    Args:
        num_gpus: None for no locks. Without a GPU in this machine there are none either.

    Returns:
        The file descriptor of each lock, by the GPU's name in CUDA_VISIBLE_DEVICES. A lock lasts until this
        process and all that inherit the descriptor (named in `pass_fds`) have closed it.

    Raises:
        SettingError: fewer GPUs are visible.
    """
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    num_visible = len(gpu_names())
    visible = [str(gpu) for gpu in range(num_visible)]
    if chosen is not None:
        named = [name.strip() for name in chosen.split(",") if name.strip()]
        # Names after a negative index are of hidden GPUs.
        visible = named[:num_visible]
    if num_gpus is None or not visible:
        return {}
    if num_gpus > len(visible):
        rule = f"must not exceed the number of visible GPUs, {len(visible)}"
        raise SettingError("gpus_per_job", rule, num_gpus)
    directory = Path(tempfile.gettempdir()) / "harness-gpus"
    directory.mkdir(exist_ok=True)
    # All users of this machine lease the same GPUs; the first of them owns the directory.
    with suppress(PermissionError):
        directory.chmod(0o777)
    while True:
        locks: dict[str, int] = {}
        for gpu in visible:
            descriptor = os.open(directory / f"{gpu}.lock", os.O_RDONLY | os.O_CREAT, 0o666)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                # Another process has it.
                os.close(descriptor)
                continue
            locks[gpu] = descriptor
            if len(locks) == num_gpus:
                return locks
        # All or nothing: two jobs that hold one GPU each and need two would wait for ever.
        for descriptor in locks.values():
            os.close(descriptor)
        time.sleep(random.uniform(0.1, 0.5))
