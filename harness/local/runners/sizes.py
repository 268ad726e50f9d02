"""Compiled sizes: which one has room for a batch, and tensors that are filled up to it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def least_fitting(sizes: Iterable[int], needed: int) -> int | None:
    """Return the smallest of these sizes, ascending, that has room for what is needed; None
    where none has.
    """
    return next((size for size in sizes if size >= needed), None)


def filled_up(tensor: Tensor, *sizes: int) -> Tensor:
    """Fill a tensor up with zeros to these sizes of its first dimensions."""
    missing = [size - present for size, present in zip(sizes, tensor.shape, strict=False)]
    if not any(missing):
        return tensor
    padding = [0, 0] * (tensor.dim() - len(sizes))  # from the last dimension to the first
    for count in reversed(missing):
        padding += [0, count]
    return torch.nn.functional.pad(tensor, padding)
