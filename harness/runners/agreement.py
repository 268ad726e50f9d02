"""Agreement of processes that run the same program, the ranks.

Layers that are split over ranks wait for each other in every pass. So a rank must not go on alone
with a plainer runner, and must not begin a pass that another one will never reach.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from harness.runners.slots import UnsupportedModelError

# torch's channel for messages between the ranks; None where the run has one process.
_group: dist.ProcessGroup | None = None


def set_group(group: dist.ProcessGroup) -> None:
    """Send messages between the ranks by this group."""
    global _group
    _group = group


def group() -> dist.ProcessGroup | None:
    """Return the group of messages between the ranks; None without ranks."""
    return _group


def of_every_rank(value: Any) -> list[Any]:
    """Return the values of all ranks, in their order. Every rank must call it."""
    if _group is None:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(_group)
    dist.all_gather_object(values, value, group=_group)
    return values


@contextmanager
def agreeing() -> Iterator[None]:
    """Let every rank raise UnsupportedModelError if one of them does within this block.

    Every rank must enter it. At its end the ranks exchange what they raised, and all raise the
    first refusal. Blocks may be nested: a refusal that was exchanged once passes through the outer
    blocks of every rank, without another exchange.
    """
    own_refusal: UnsupportedModelError | None = None
    try:
        yield
    except UnsupportedModelError as error:
        if error.is_agreed:
            raise
        own_refusal = error
    refusals = of_every_rank(own_refusal)
    for rank, refusal in enumerate(refusals):
        if refusal is not None:
            where = "" if None not in refusals else f" on rank {rank}"
            raise type(refusal)(f"{refusal}{where}", is_agreed=True) from own_refusal
