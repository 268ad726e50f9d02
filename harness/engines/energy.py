"""Energy of GPUs, and why their clocks are lowered, by NVML. Everything is empty without it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pynvml

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
        joules: of all of them, what they take when idle included; None where a GPU does not count,
            0 where the time was shorter than the period in which it does.
        throttled: why clocks were lowered when it ended.
    """

    joules: float | None
    throttled: tuple[str, ...]


class GpuMeter:
    """Reads counters of GPUs at its creation and at `stop`.

    Args:
        gpus: their UUIDs; none where nothing computes on them.
    """

    def __init__(self, gpus: Sequence[str]) -> None:
        self._gpus = gpus
        self._before = _energy_mj(gpus)

    def stop(self) -> GpuUse | None:
        """The use since the creation; None without GPUs."""
        if not self._gpus:
            return None
        now = _energy_mj(self._gpus)
        joules = None
        if now is not None and self._before is not None and now >= self._before:
            joules = (now - self._before) / 1000
        reasons = {name for gpu in self._gpus for name in throttle_reasons(gpu)}
        return GpuUse(joules, tuple(sorted(reasons)))


def throttle_reasons(gpu: str) -> list[str]:
    """Why the clocks of a GPU are lowered now; none where that is not known."""
    try:
        handle = pynvml.nvmlDeviceGetHandleByUUID(gpu)
        bits = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    except pynvml.NVMLError:
        return []
    return [name for bit, name in REASONS.items() if bits & bit]


def _energy_mj(gpus: Sequence[str]) -> int | None:
    """Millijoules of all GPUs since their driver was loaded; None where one does not count them."""
    try:
        handles = [pynvml.nvmlDeviceGetHandleByUUID(gpu) for gpu in gpus]
        return sum(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) for handle in handles)
    except pynvml.NVMLError:
        return None
