"""Finds the GPUs that a run may use, measures free and peak memory, synchronises GPUs, and sets the number of threads
on a CPU.
"""

from __future__ import annotations

import functools
import os
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
from harness.config.machine import SWEEP_THREADS, num_free_cores, num_usable_cores, threads_are_set
from harness.config.settings import ModelSettings, PlacementSettings
from harness.local.models.sketch import Device

# torch's `segment_pool_id` for memory that does not belong to a captured graph.
_SHARED_POOL = (0, 0)
# Several threads are used only if a pass then takes less than this share of the time with one thread. The share is
# below 1, so that runs choose the same number even if the two times are nearly equal.
_FASTER = 0.9
# To time a pass, it is repeated until there are this many times, or until they add up to this many seconds.
_MOST_PASSES = 9
_MOST_PASSES_S = 1.0


def visible_gpus() -> list[int]:
    """Return the indices of this machine's GPUs, in order; empty if there are none.

    Raises:
        RunError: the machine has GPUs, but CUDA does not start.
    """
    count = torch.cuda.device_count()
    if count == 0:
        return []
    # `device_count()` asks the driver's library, and does not start CUDA. If CUDA does not start, that must be an
    # error: `is_available()` would only print a warning, and the run would use the CPU.
    try:
        torch.cuda.init()
    except RuntimeError as exception:
        error = RunError(f"CUDA does not start: {first_line(exception)}")
        raise as_run_error(exception) or error from exception
    return list(range(count))


def usable_gpus(placement: PlacementSettings, models: Mapping[str, ModelSettings]) -> list[int]:
    """Return the GPUs of this machine on which a run may place its models; empty if it uses the CPU. The run does not
    touch other GPUs.

    Args:
        models: the settings of the models, by their roles `model` and `draft`.

    Raises:
        SettingError: there are fewer GPUs than the settings require.
        RunError: the machine has GPUs, but CUDA does not start.
    """
    if placement.strategy == "cpu":
        return []
    gpus = visible_gpus()
    check_gpu_numbers(placement, models, len(gpus))
    # The target's `gpus` says how many GPUs, not which, so all GPUs of the machine are candidates.
    if models["model"].gpus:
        return gpus
    return gpus[: placement.gpus]


def check_gpu_numbers(
    placement: PlacementSettings, models: Mapping[str, ModelSettings], num_gpus: int
) -> None:
    """Raise a SettingError if the settings require more GPUs than there are.

    On a machine without GPUs, `gpus` of a model has no effect. The CPU is used, and the user is told
    (`PlacedModel.describe`).

    Args:
        models: the settings of the models, by their roles `model` and `draft`.
    """
    numbers = {"placement": placement.gpus}
    numbers |= {role: model.gpus for role, model in models.items()}
    for setting, number in numbers.items():
        has_effect = num_gpus > 0 or setting == "placement"
        if number is not None and has_effect and num_gpus < number:
            rule = f"must not exceed the number of GPUs, {num_gpus}"
            raise SettingError(f"{setting}.gpus", rule, number)


def free_memory(gpus: Iterable[int]) -> dict[Device, int]:
    """Return how many bytes can still be allocated on each of `gpus` and, under the key `"cpu"`, in main memory.

    Memory that torch has reserved but does not use counts as free. If `gpus` is empty, CUDA is not started.
    """
    free: dict[Device, int] = {}
    for gpu in gpus:
        cached = torch.cuda.memory_reserved(gpu) - torch.cuda.memory_allocated(gpu)
        free[gpu] = torch.cuda.mem_get_info(gpu)[0] + cached
    free["cpu"] = psutil.virtual_memory().available
    return free


def limit_num_threads() -> None:
    """Limit torch's threads to the number of usable cores, unless the user has set the number of threads.

    If there were more threads than the quota of the cgroup allows, all threads would stop for the rest of each of the
    quota's periods.
    """
    if not threads_are_set():
        torch.set_num_threads(min(torch.get_num_threads(), num_usable_cores()))


@functools.cache
def _most_threads() -> int:
    """Return torch's number of threads before the first model of this process changed it: the result of the first call
    is kept.
    """
    return torch.get_num_threads()


def choose_num_threads(model: PreTrainedModel) -> None:
    """Set the number of torch's threads for a model on the CPU: as many as there are idle cores, up to the number
    that torch began with, if that is faster than one thread, and otherwise one. `OMP_NUM_THREADS` overrides this; and a
    sweep's first job decides for the others.

    While another program runs, several threads may be much slower than one thread, because the threads of a pass wait
    for each other. (Measured: two threads were ten times slower.)
    """
    if threads_are_set():
        return
    of_sweep = int(os.environ.get(SWEEP_THREADS, 0))
    num_threads = of_sweep or min(_most_threads(), num_free_cores())
    if num_threads > 1 and not of_sweep:
        is_faster = _pass_seconds(model, num_threads) < _FASTER * _pass_seconds(model, 1)
        num_threads = num_threads if is_faster else 1
    torch.set_num_threads(num_threads)


def _pass_seconds(model: PreTrainedModel, num_threads: int) -> float:
    """Return the median time of a pass over one token with this number of threads, in seconds. The number stays set."""
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
    """Start a new period for `peak_memory_bytes`, on every GPU among `devices`."""
    for gpu in _gpus(devices):
        torch.cuda.reset_peak_memory_stats(gpu)


def peak_memory_bytes(devices: Sequence[torch.device]) -> int | None:
    """Return the peak of the memory that torch has allocated on GPUs since the last reset, in bytes; None without a
    GPU.

    This is the sum of the peaks of all GPUs among `devices`. It may be more than was allocated at any one time, because
    the GPUs may have their peaks at different times. Memory that CUDA graphs hold for their replays is included.
    """
    gpus = _gpus(devices)
    if not gpus:
        return None
    num_bytes = sum(torch.cuda.max_memory_allocated(gpu) for gpu in gpus)
    # torch does not count memory in the pools of captured graphs as allocated.
    indices = {gpu.index or 0 for gpu in gpus}
    for segment in torch.cuda.memory_snapshot():
        is_of_graph = tuple(segment["segment_pool_id"]) != _SHARED_POOL
        if is_of_graph and segment["device"] in indices:
            num_bytes += segment["total_size"] - segment["allocated_size"]
    return num_bytes


def release_memory(devices: Iterable[torch.device]) -> None:
    """Give memory that torch has reserved but does not use back to the driver, if there is a GPU among `devices`."""
    if _gpus(devices):
        # After a failed capture of a CUDA graph, torch raises an error here.
        with suppress(RuntimeError):
            torch.cuda.empty_cache()


def gpu_uuids(devices: Sequence[torch.device]) -> list[str]:
    """Return the UUIDs of the GPUs among these devices; empty without a GPU, or if NVML (NVIDIA's library for
    monitoring) does not start. NVML stays initialised.

    NVML identifies GPUs by UUID, because it numbers GPUs in another order than CUDA does.
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
