"""The GPUs that may be used, and what is free on them and in main memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import psutil
import torch

from harness.config.errors import RunError, SettingError
from harness.config.settings import PlacementSettings
from harness.models.failures import as_run_error, first_line
from harness.models.ranks import sum_over_ranks, world


def visible_gpus(placement: PlacementSettings, setting: str = "placement.gpus") -> list[int]:
    """Indices of the GPUs that `placement` may use, from the first visible one on; empty where only the CPU may.

    With several ranks, each has one GPU.

    Raises:
        SettingError: if more GPUs are wanted, by `setting`, than are visible (a machine without any uses the CPU).
        RunError: if there are GPUs and CUDA does not start.
    """
    if placement.strategy == "cpu":
        return []
    count = torch.cuda.device_count()
    if count == 0:
        return []
    # The count comes from the driver's library and needs no CUDA. `is_available()` would turn a failed start into a
    # warning and a silent run on the CPU.
    try:
        torch.cuda.init()
    except RuntimeError as exception:
        raise as_run_error(exception) or RunError(
            f"CUDA does not start: {first_line(exception)}"
        ) from exception
    if placement.gpus is not None and placement.gpus > count:
        raise SettingError(
            setting, f"must not exceed the number of visible GPUs, {count}", placement.gpus
        )
    if (ranks := world()).size > 1:
        if ranks.size > count:
            raise SettingError(
                setting, f"must not exceed the number of visible GPUs, {count}", ranks.size
            )
        return [ranks.rank]
    return list(range(count))[: placement.gpus]


def free_memory(gpus: Iterable[int]) -> dict[int | str, int]:
    """Bytes that can still be allocated on each of `gpus` and, as `"cpu"`, in main memory.

    What torch holds in its cache without using it counts as free. Naming no GPU starts no CUDA.
    """
    free: dict[int | str, int] = {}
    for gpu in gpus:
        cached = torch.cuda.memory_reserved(gpu) - torch.cuda.memory_allocated(gpu)
        free[gpu] = torch.cuda.mem_get_info(gpu)[0] + cached
    free["cpu"] = psutil.virtual_memory().available
    return free


def synchronize(devices: Sequence[torch.device]) -> None:
    """Wait until every GPU among `devices` has finished what was queued."""
    for device in _gpus(devices):
        torch.cuda.synchronize(device)


def reset_peak_memory(devices: Sequence[torch.device]) -> None:
    """Let `peak_memory_bytes` count from here."""
    for device in _gpus(devices):
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory_bytes(devices: Sequence[torch.device]) -> int | None:
    """The most bytes torch had allocated since the last reset, summed over the GPUs among `devices`; None without one.

    Each GPU's own peak counts, so the sum may exceed what was held at any one moment. Ranks add up theirs.
    """
    gpus = _gpus(devices)
    return (
        sum_over_ranks(sum(torch.cuda.max_memory_allocated(device) for device in gpus))
        if gpus
        else None
    )


def _gpus(devices: Sequence[torch.device]) -> list[torch.device]:
    return [device for device in devices if device.type == "cuda"]
