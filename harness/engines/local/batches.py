"""Batches of a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

Item = TypeVar("Item")


def in_batches(items: Sequence[Item], size: int) -> list[Sequence[Item]]:
    """The same in lists of at most this size."""
    return [items[first : first + size] for first in range(0, len(items), size)]
