"""Energy of GPUs, and why their clocks are lowered, by NVML. Everything is empty without it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import pynvml
import torch

from harness.models.ranks import world

# NVML's bits for clocks that are lowered because of heat or power, not because the GPU idles.
REASONS = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "temperature (software)",
    0x40: "temperature (hardware)",
    0x80: "power brake",
}


@dataclass(frozen=True)
class GpuUse:
    """Energy and lowered clocks of GPUs during a generation.

    Attributes:
        joules: of all of them, what they take when idle included; None where a GPU does not count.
        throttled: why clocks were lowered when it ended.
    """

    joules: float | None
    throttled: tuple[str, ...]


class GpuMeter:
    """Reads counters of GPUs at its creation and at `stop`.

    Args:
        gpus: indices for NVML; none where nothing computes on them.
    """

    def __init__(self, gpus: Sequence[int]) -> None:
        self._gpus = gpus
        self._before = _energy_mj(gpus)

    def stop(self) -> GpuUse | None:
        """The use since the creation; None without GPUs."""
        if not self._gpus:
            return None
        now = _energy_mj(self._gpus)
        joules = None
        if now is not None and self._before is not None and now > self._before:
            joules = (now - self._before) / 1000
        reasons = {name for gpu in self._gpus for name in throttle_reasons(gpu)}
        return GpuUse(joules, tuple(sorted(reasons)))


def throttle_reasons(gpu: int) -> list[str]:
    """Why the clocks of a GPU are lowered now; none where that is not known."""
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(gpu)
        bits = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    except pynvml.NVMLError:
        return []
    return [name for bit, name in REASONS.items() if bits & bit]


def nvml_gpus() -> list[int]:
    """Indices for NVML of the GPUs that this process sees, in its order; [] without NVML."""
    try:
        pynvml.nvmlInit()
        everything = list(range(pynvml.nvmlDeviceGetCount()))
    except pynvml.NVMLError:
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return everything
    chosen = [int(name) for name in visible.split(",") if name.strip().isdigit()]
    return [gpu for gpu in chosen if gpu in everything]


def gpus_of(devices: Sequence[torch.device]) -> list[int]:
    """Indices for NVML of the GPUs among these devices.

    Where several processes (ranks) share the models, a rank's own devices are one GPU: all are
    meant.
    """
    places = [device.index or 0 for device in devices if device.type == "cuda"]
    if not places:
        return []
    visible = nvml_gpus()
    num_ranks = world().size
    if num_ranks > 1:
        return visible[:num_ranks]
    return [visible[place] for place in places if place < len(visible)]


def _energy_mj(gpus: Sequence[int]) -> int | None:
    """Millijoules of all GPUs since their driver was loaded; None where one does not count them."""
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(gpu) for gpu in gpus]
        return sum(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) for handle in handles)
    except pynvml.NVMLError:
        return None
