"""Agreement of processes that run the same program, the ranks.

Layers that are split over ranks wait for each other in every pass. So a rank must not go on alone
with a plainer runner, and must not begin a pass that another one will never reach.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from harness.runners.slots import UnsupportedModelError

# None where the run has one process.
_exchange: Callable[[Any], list[Any]] | None = None


def exchange_by(exchange: Callable[[Any], list[Any]]) -> None:
    """Exchange values between the ranks by this function, `models.ranks.of_every_rank`."""
    global _exchange
    _exchange = exchange


def of_every_rank(value: Any) -> list[Any]:
    """The values of all ranks, in their order. Every rank must call it."""
    if _exchange is not None:
        return _exchange(value)
    assert not dist.is_initialized()
    return [value]


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
