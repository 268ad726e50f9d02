"""Copies lists of numbers to a device without waiting for the device, and pads rows of tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(
    numbers: Sequence[int] | Sequence[Sequence[int]],
    device: torch.device | str,
) -> Tensor:
    """Copy numbers [n] or [B, n] to an int64 tensor on `device`.

    `torch.tensor(numbers, device="cuda")` would wait until the device has finished all queued work. A copy from pinned
    memory is only added to the queue.
    """
    if torch.device(device).type != "cuda":
        return torch.tensor(numbers, dtype=torch.long, device=device)
    return torch.tensor(numbers, dtype=torch.long, pin_memory=True).to(device, non_blocking=True)


def padded(rows: Sequence[Sequence[int]], least: int = 0) -> list[list[int]]:
    """Pad rows of tokens with zeros on the right, to the length of the longest row, and to at least `least` tokens.

    [[5, 6, 7], [8]] becomes [[5, 6, 7], [8, 0, 0]].
    """
    width = max(least, *map(len, rows))
    return [[*row, *[0] * (width - len(row))] for row in rows]
