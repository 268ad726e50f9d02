"""The loaded models of an engine, for what measures them: their devices' queues, memory and GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import pynvml
import torch

from harness.engines.protocol import Weights
from harness.local.engine.reference import ModelReference
from harness.local.models import devices


def loaded_weights(used: Sequence[torch.device], reference: ModelReference) -> Weights:
    """The weights of an engine over a loaded pair.

    Args:
        used: the devices that hold the models and compute.
        reference: over the same models.
    """
    return Weights(
        reference,
        gpus_of(used),
        synchronize=partial(devices.synchronize, used),
        reset_peak_memory=partial(devices.reset_peak_memory, used),
        peak_memory_bytes=partial(devices.peak_memory_bytes, used),
    )


def gpus_of(devices: Sequence[torch.device]) -> list[str]:
    """UUIDs of the GPUs among these devices, for NVML, which counts GPUs in another order than CUDA.

    [] without NVML, and where one of them is an instance of a divided GPU (MIG): what a GPU counts
    is of all its instances.
    """
    places = [device.index or 0 for device in devices if device.type == "cuda"]
    if not places:
        return []
    try:
        pynvml.nvmlInit()
        gpus = [f"GPU-{torch.cuda.get_device_properties(place).uuid}" for place in places]
        for gpu in gpus:
            handle = pynvml.nvmlDeviceGetHandleByUUID(gpu)
            with suppress(pynvml.NVMLError):  # of a kind that cannot be divided
                is_divided, _ = pynvml.nvmlDeviceGetMigMode(handle)
                if is_divided:
                    return []
    except pynvml.NVMLError:
        return []
    return gpus
