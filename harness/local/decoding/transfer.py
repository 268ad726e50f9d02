"""Numbers copied between the host and a device, without waiting for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def to_device(
    numbers: Sequence[float] | Sequence[Sequence[int]],
    device: torch.device | str,
) -> Tensor:
    """Copy numbers [n] or [B, n] to a tensor on `device`.

    `torch.tensor(numbers, device="cuda")` waits until the device has finished all queued work; a
    copy from pinned memory is queued behind it instead.
    """
    first = numbers[0] if numbers else None
    if isinstance(first, int | float) and all(number == first for number in numbers):
        # Filling costs less than a copy.
        return torch.full((len(numbers),), first, dtype=torch.long, device=device)
    if torch.device(device).type != "cuda":
        return torch.tensor(numbers, dtype=torch.long, device=device)
    return torch.tensor(numbers, dtype=torch.long, pin_memory=True).to(device, non_blocking=True)


def padded(rows: Iterable[Sequence[int]], width: int) -> list[list[int]]:
    """Fill rows of tokens up to a width, on their right."""
    return [[*row, *[0] * (width - len(row))] for row in rows]


def decided_tokens(
    proposed: Tensor, num_accepted: Sequence[int], next_tokens: Sequence[int]
) -> Tensor:
    """Return what a verdict decided: of row b the first num_accepted[b] tokens of proposed [B, K],
    then the next token. What follows these fills the rows up: proposed (7, 8) with one accepted and
    the next token 9 gives (7, 9, 0) if another row has accepted two.
    """
    device = proposed.device
    following = to_device(next_tokens, device).unsqueeze(1)
    longest = max(num_accepted)
    if not longest:
        return following
    room = proposed.new_zeros(len(next_tokens), 1)
    places = to_device(num_accepted, device).unsqueeze(1)
    return torch.cat([proposed[:, :longest], room], dim=1).scatter_(1, places, following)
