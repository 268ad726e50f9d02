"""The GPUs that may be used, their queues, and the free memory on them and in main memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

import psutil
import pynvml
import torch
from transformers import PreTrainedModel

from harness.config.errors import RunError, SettingError
from harness.config.failures import as_run_error, first_line
from harness.config.machine import num_free_cores, num_usable_cores, threads_are_set
from harness.config.settings import ModelSettings, PlacementSettings
from harness.local.models.sketch import Device

# `segment_pool_id` of the memory that belongs to no captured graph.
_SHARED_POOL = (0, 0)
# Several threads are taken if their passes need less than this share of one thread's time: two runs choose alike.
_FASTER = 0.9
_MOST_PASSES = 9
_MOST_PASSES_S = 1.0


def visible_gpus() -> list[int]:
    """Indices of the GPUs of this machine, in order; empty without any.

    Raises:
        RunError: there are GPUs, and CUDA does not start.
    """
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
    return list(range(count))


def usable_gpus(placement: PlacementSettings, models: Mapping[str, ModelSettings]) -> list[int]:
    """The GPUs of this machine on which a run may place its models; no others are touched.

    Args:
        models: by their roles.

    Raises:
        SettingError: fewer GPUs than the settings ask for.
    """
    if placement.strategy == "cpu":
        return []
    gpus = visible_gpus()
    check_gpu_numbers(placement, models, len(gpus))
    # A model's own number says how many, not which.
    if any(model.gpus for model in models.values()):
        return gpus
    return gpus[: placement.gpus]


def check_gpu_numbers(
    placement: PlacementSettings, models: Mapping[str, ModelSettings], num_gpus: int
) -> None:
    """Raise a SettingError for more GPUs than there are; a model's own number is of no effect on a machine without any,
    which uses the CPU and says so.

    Args:
        models: by their roles.
    """
    numbers = {"placement": placement.gpus}
    numbers |= {role: model.gpus for role, model in models.items()}
    for setting, number in numbers.items():
        has_effect = num_gpus > 0 or setting == "placement"
        if number is not None and has_effect and num_gpus < number:
            rule = f"must not exceed the number of GPUs, {num_gpus}"
            raise SettingError(f"{setting}.gpus", rule, number)


def free_memory(gpus: Iterable[int]) -> dict[Device, int]:
    """Bytes that can still be allocated on each of `gpus` and, as `"cpu"`, in main memory.

    Unused memory in torch's cache counts as free. Without any GPU in `gpus`, CUDA does not start.
    """
    free: dict[Device, int] = {}
    for gpu in gpus:
        cached = torch.cuda.memory_reserved(gpu) - torch.cuda.memory_allocated(gpu)
        free[gpu] = torch.cuda.mem_get_info(gpu)[0] + cached
    free["cpu"] = psutil.virtual_memory().available
    return free


def limit_num_threads() -> None:
    """Have no more threads than usable cores: beyond a cgroup's quota all would stop for the rest of each period."""
    if not threads_are_set():
        torch.set_num_threads(min(torch.get_num_threads(), num_usable_cores()))


def choose_num_threads(model: PreTrainedModel) -> None:
    """Have a model on the CPU compute with one thread, or with as many as cores are free where that is faster.

    The threads of a pass wait for one another, so that beside another program several may be many times slower.
    """
    if threads_are_set():
        return
    num_threads = min(torch.get_num_threads(), num_free_cores())
    if num_threads > 1:
        is_faster = _pass_seconds(model, num_threads) < _FASTER * _pass_seconds(model, 1)
        num_threads = num_threads if is_faster else 1
    torch.set_num_threads(num_threads)


def _pass_seconds(model: PreTrainedModel, num_threads: int) -> float:
    """Median time of a pass of one token by so many threads, which stay."""
    torch.set_num_threads(num_threads)
    token = torch.zeros((1, 1), dtype=torch.long)
    times: list[float] = []
    with torch.inference_mode():
        model(token)
        while len(times) < _MOST_PASSES and sum(times) < _MOST_PASSES_S:
            started = time.perf_counter()
            model(token)
            times.append(time.perf_counter() - started)
    return statistics.median(times)


def synchronize(devices: Sequence[torch.device]) -> None:
    """Wait until every GPU among `devices` has finished its queue."""
    for gpu in _gpus(devices):
        torch.cuda.synchronize(gpu)


def reset_peak_memory(devices: Sequence[torch.device]) -> None:
    """Start a new period for `peak_memory_bytes`."""
    for gpu in _gpus(devices):
        torch.cuda.reset_peak_memory_stats(gpu)


def peak_memory_bytes(devices: Sequence[torch.device]) -> int | None:
    """The most bytes that torch had allocated since the last reset; None without a GPU.

    The sum of every GPU's own peak. It may exceed the total at any one moment.
    Memory that CUDA graphs hold for their replays counts as well.
    """
    gpus = _gpus(devices)
    if not gpus:
        return None
    num_bytes = sum(torch.cuda.max_memory_allocated(gpu) for gpu in gpus)
    # Torch does not count what pools of captured graphs hold as allocated.
    indices = {gpu.index or 0 for gpu in gpus}
    for segment in torch.cuda.memory_snapshot():
        is_of_graph = tuple(segment["segment_pool_id"]) != _SHARED_POOL
        if is_of_graph and segment["device"] in indices:
            num_bytes += segment["total_size"] - segment["allocated_size"]
    return num_bytes


def release_memory(devices: Iterable[torch.device]) -> None:
    """Give memory that is no longer used back to the GPUs among `devices`."""
    if _gpus(devices):
        # torch refuses to after a capture that failed.
        with suppress(RuntimeError):
            torch.cuda.empty_cache()


def gpu_uuids(devices: Sequence[torch.device]) -> list[str]:
    """UUIDs of the GPUs among these devices, for NVML, which counts GPUs in another order than CUDA.

    [] without NVML.
    """
    gpus = _gpus(devices)
    if not gpus:
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    return [f"GPU-{torch.cuda.get_device_properties(gpu.index or 0).uuid}" for gpu in gpus]


def _gpus(devices: Iterable[torch.device]) -> list[torch.device]:
    return [device for device in devices if device.type == "cuda"]
