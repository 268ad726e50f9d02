"""The GPUs that may be used, and the free memory on them and in main memory.

Imports torch in functions alone: an engine without devices here does not wait for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import psutil

from harness.config.errors import RunError, SettingError
from harness.config.settings import PlacementSettings

if TYPE_CHECKING:
    import torch

    from harness.local.models.sketch import Device

# `segment_pool_id` of the memory that belongs to no captured graph.
_SHARED_POOL = (0, 0)


def visible_gpus(placement: PlacementSettings, setting: str = "placement.gpus") -> list[int]:
    """Indices of the GPUs that `placement` may use, in order; empty if the CPU alone may be used.

    Raises:
        SettingError: `setting` wants more GPUs than are visible (a machine without any uses the
            CPU).
        RunError: there are GPUs, and CUDA does not start.
    """
    if placement.strategy == "cpu":
        return []
    import torch

    from harness.config.failures import as_run_error, first_line

    count = torch.cuda.device_count()
    if count == 0:
        return []
    # The count comes from the driver's library and needs no CUDA. `is_available()` would turn a
    # failed start into a warning and a silent run on the CPU.
    try:
        torch.cuda.init()
    except RuntimeError as exception:
        error = RunError(f"CUDA does not start: {first_line(exception)}")
        raise as_run_error(exception) or error from exception
    num_wanted = placement.gpus or 1
    if num_wanted > count:
        rule = f"must not exceed the number of visible GPUs, {count}"
        raise SettingError(setting, rule, num_wanted)
    return list(range(count))[: placement.gpus]


def free_memory(gpus: Iterable[int]) -> dict[Device, int]:
    """Bytes that can still be allocated on each of `gpus` and, as `"cpu"`, in main memory.

    Unused memory in torch's cache counts as free. Without any GPU in `gpus`, CUDA does not start.
    """
    import torch

    free: dict[Device, int] = {}
    for gpu in gpus:
        cached = torch.cuda.memory_reserved(gpu) - torch.cuda.memory_allocated(gpu)
        free[gpu] = torch.cuda.mem_get_info(gpu)[0] + cached
    free["cpu"] = psutil.virtual_memory().available
    return free


def synchronize(devices: Sequence[torch.device]) -> None:
    """Wait until every GPU among `devices` has finished its queue."""
    gpus = _gpus(devices)
    if gpus:
        import torch

        for device in gpus:
            torch.cuda.synchronize(device)


def reset_peak_memory(devices: Sequence[torch.device]) -> None:
    """Start a new period for `peak_memory_bytes`."""
    gpus = _gpus(devices)
    if gpus:
        import torch

        for device in gpus:
            torch.cuda.reset_peak_memory_stats(device)


def peak_memory_bytes(devices: Sequence[torch.device]) -> int | None:
    """The most bytes that torch had allocated since the last reset; None without a GPU.

    The sum of every GPU's own peak. It may exceed the total at any one moment.
    Memory that CUDA graphs hold for their replays counts as well.
    """
    gpus = _gpus(devices)
    if not gpus:
        return None
    import torch

    num_bytes = sum(torch.cuda.max_memory_allocated(device) for device in gpus)
    # Torch does not count what pools of captured graphs hold as allocated.
    indices = {device.index or 0 for device in gpus}
    for segment in torch.cuda.memory_snapshot():
        is_of_graph = tuple(segment["segment_pool_id"]) != _SHARED_POOL
        if is_of_graph and segment["device"] in indices:
            num_bytes += segment["total_size"] - segment["allocated_size"]
    return num_bytes


def _gpus(devices: Sequence[torch.device]) -> list[torch.device]:
    return [device for device in devices if device.type == "cuda"]


def release_memory(devices: Iterable[torch.device]) -> None:
    """Give memory that is no longer used back to the GPUs among `devices`."""
    import torch

    if any(device.type == "cuda" for device in devices):
        torch.cuda.empty_cache()
