"""Devices: which GPUs may be used, free and peak memory, synchronisation, and the number of threads on a CPU."""

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

# The `segment_pool_id` of memory that belongs to no captured graph.
_SHARED_POOL = (0, 0)
# Several threads are used if their passes take less than this share of one thread's time. Below 1, so that two runs
# choose alike even if the times are nearly equal.
_FASTER = 0.9
_MOST_PASSES = 9
_MOST_PASSES_S = 1.0


def visible_gpus() -> list[int]:
    """Return the indices of this machine's GPUs, in order; empty if there are none.

    Raises:
        RunError: there are GPUs, but CUDA does not start.
    """
    count = torch.cuda.device_count()
    if count == 0:
        return []
    # The count comes from the driver's library, without starting CUDA. `is_available()` would turn a
    # failed start into a warning, and the run would silently use the CPU.
    try:
        torch.cuda.init()
    except RuntimeError as exception:
        error = RunError(f"CUDA does not start: {first_line(exception)}")
        raise as_run_error(exception) or error from exception
    return list(range(count))


def usable_gpus(placement: PlacementSettings, models: Mapping[str, ModelSettings]) -> list[int]:
    """Return the GPUs of this machine on which a run may place its models. No other GPU is touched.

    Args:
        models: the models by their roles.

    Raises:
        SettingError: there are fewer GPUs than the settings ask for.
    """
    if placement.strategy == "cpu":
        return []
    gpus = visible_gpus()
    check_gpu_numbers(placement, models, len(gpus))
    # A model's own `gpus` is a number of GPUs, which may be any of them.
    if any(model.gpus for model in models.values()):
        return gpus
    return gpus[: placement.gpus]


def check_gpu_numbers(
    placement: PlacementSettings, models: Mapping[str, ModelSettings], num_gpus: int
) -> None:
    """Raise a SettingError if settings ask for more GPUs than there are. On a machine without GPUs a model's own number
    has no effect: the CPU is used, and the user is told.

    Args:
        models: the models by their roles.
    """
    numbers = {"placement": placement.gpus}
    numbers |= {role: model.gpus for role, model in models.items()}
    for setting, number in numbers.items():
        has_effect = num_gpus > 0 or setting == "placement"
        if number is not None and has_effect and num_gpus < number:
            rule = f"must not exceed the number of GPUs, {num_gpus}"
            raise SettingError(f"{setting}.gpus", rule, number)


def free_memory(gpus: Iterable[int]) -> dict[Device, int]:
    """Return the bytes that can still be allocated on each of `gpus` and, under `"cpu"`, in main memory.

    Unused memory in torch's cache counts as free. CUDA is not started if `gpus` is empty.
    """
    free: dict[Device, int] = {}
    for gpu in gpus:
        cached = torch.cuda.memory_reserved(gpu) - torch.cuda.memory_allocated(gpu)
        free[gpu] = torch.cuda.mem_get_info(gpu)[0] + cached
    free["cpu"] = psutil.virtual_memory().available
    return free


def limit_num_threads() -> None:
    """Let torch use no more threads than usable cores. With more threads than a cgroup's quota allows, all of them
    would stop for the rest of each period.
    """
    if not threads_are_set():
        torch.set_num_threads(min(torch.get_num_threads(), num_usable_cores()))


def choose_num_threads(model: PreTrainedModel) -> None:
    """Let torch use one thread for a model on the CPU, or as many as there are idle cores, if that is faster.

    The threads of a pass wait for each other. So while another program runs, several threads may be many times slower
    than one.
    """
    if threads_are_set():
        return
    num_threads = min(torch.get_num_threads(), num_free_cores())
    if num_threads > 1:
        is_faster = _pass_seconds(model, num_threads) < _FASTER * _pass_seconds(model, 1)
        num_threads = num_threads if is_faster else 1
    torch.set_num_threads(num_threads)


def _pass_seconds(model: PreTrainedModel, num_threads: int) -> float:
    """Return the median seconds of a pass over one token with this number of threads, which stays set."""
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
    """Wait until every GPU among `devices` has finished its queued work."""
    for gpu in _gpus(devices):
        torch.cuda.synchronize(gpu)


def reset_peak_memory(devices: Sequence[torch.device]) -> None:
    """Start a new period for `peak_memory_bytes`."""
    for gpu in _gpus(devices):
        torch.cuda.reset_peak_memory_stats(gpu)


def peak_memory_bytes(devices: Sequence[torch.device]) -> int | None:
    """Return the most bytes that torch has allocated since the last reset; None without a GPU.

    This is the sum of each GPU's own peak, which may exceed the total at any one moment.
    Memory that CUDA graphs hold for their replays is included.
    """
    gpus = _gpus(devices)
    if not gpus:
        return None
    num_bytes = sum(torch.cuda.max_memory_allocated(gpu) for gpu in gpus)
    # Torch does not count the memory in the pools of captured graphs as allocated.
    indices = {gpu.index or 0 for gpu in gpus}
    for segment in torch.cuda.memory_snapshot():
        is_of_graph = tuple(segment["segment_pool_id"]) != _SHARED_POOL
        if is_of_graph and segment["device"] in indices:
            num_bytes += segment["total_size"] - segment["allocated_size"]
    return num_bytes


def release_memory(devices: Iterable[torch.device]) -> None:
    """Return unused memory to the GPUs among `devices`."""
    if _gpus(devices):
        # After a failed capture torch refuses this.
        with suppress(RuntimeError):
            torch.cuda.empty_cache()


def gpu_uuids(devices: Sequence[torch.device]) -> list[str]:
    """Return the UUIDs of the GPUs among these devices, for NVML, which numbers GPUs in another order than CUDA.
    Empty without NVML.
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
