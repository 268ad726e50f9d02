"""Why clocks of GPUs are lowered, by NVML."""

from __future__ import annotations

import pynvml

# NVML's bits for clocks that are lowered because of heat or power, not because the GPU idles.
REASONS = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "temperature (software)",
    0x40: "temperature (hardware)",
    0x80: "power brake",
}


def throttle_reasons(gpu: str) -> list[str]:
    """Why the clocks of a GPU are lowered now; none where that is not known."""
    try:
        handle = pynvml.nvmlDeviceGetHandleByUUID(gpu)
        bits = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    except pynvml.NVMLError:
        return []
    return [name for bit, name in REASONS.items() if bits & bit]
