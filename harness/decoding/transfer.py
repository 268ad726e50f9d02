"""Numbers copied between the host and a device, without waiting for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def to_device(numbers: Sequence[int], device: torch.device | str) -> Tensor:
    """Whole numbers [n] as a tensor (int64) on `device`.

    `torch.tensor(numbers, device="cuda")` waits until the device has finished all queued work; a copy from pinned
    memory is queued behind it instead.
    """
    if torch.device(device).type != "cuda":
        return torch.tensor(numbers, device=device)
    return torch.tensor(numbers, pin_memory=True).to(device, non_blocking=True)


def to_host(tensor: Tensor) -> Callable[[], list[Any]]:
    """Begin to copy a tensor; the result waits for this copy and returns the numbers, as `tolist` does.

    `tolist` itself would wait for everything that is queued when it is called.
    """
    if tensor.device.type != "cuda":
        return tensor.tolist
    arriving = tensor.to("cpu", non_blocking=True)  # pinned, as torch does for such copies
    arrived = torch.cuda.Event()
    arrived.record(torch.cuda.current_stream(tensor.device))

    def read() -> list[Any]:
        arrived.synchronize()
        return arriving.tolist()

    return read
