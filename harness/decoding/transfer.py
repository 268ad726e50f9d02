"""Numbers copied from the host to a device, without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence

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
