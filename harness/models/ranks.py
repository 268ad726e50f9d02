"""Every layer split over several processes, the ranks, by transformers' own `tp_plan`: one device each, all at work.

All ranks run the same program on the same numbers. Randomness is data, and what the ranks add up or gather is the same
to the last bit on each, so they decide alike without talking to each other; `check_agreement` checks that after each
generation. A model that is not split is a copy on every rank.

A rank reads who it is from the variables that `torchrun` sets: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT.
"""

from __future__ import annotations

import hashlib
import os
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from transformers.distributed import DistributedConfig

from harness.config.errors import RunError
from harness.models.failures import first_line

# Loading may take one rank minutes longer than another; a longer wait means a hung process.
_TIMEOUT = timedelta(minutes=10)
# Ranks finish a generation within one forward of each other.
_AGREEMENT_TIMEOUT = timedelta(minutes=1)

# For messages between the ranks; layers use another group. On the CPU, so that nothing waits for a GPU.
_control: dist.ProcessGroup | None = None


class World(NamedTuple):
    """This process among the ranks; the only one where there are none."""

    rank: int
    size: int


def world() -> World:
    """Which rank this process is, and of how many."""
    return World(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))


def join(device: torch.device, num_ranks: int) -> None:
    """Meet the other ranks, once per process. NCCL on a GPU, gloo on the CPU, whose cores the ranks share.

    Raises RunError if there are not that many processes, or they do not meet.
    """
    global _control
    if world().size != num_ranks:
        what = f"tensor_parallel needs {num_ranks} processes, this is one of {world().size}"
        raise RunError(f"{what}: run it by the command line, or by torchrun")
    if dist.is_initialized():
        return
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // world().size))
    try:
        dist.init_process_group("nccl" if on_gpu else "gloo", timeout=_TIMEOUT, device_id=device if on_gpu else None)
        _control = dist.new_group(backend="gloo", timeout=_AGREEMENT_TIMEOUT)
    except (RuntimeError, ValueError) as exception:
        raise RunError(f"the ranks of tensor_parallel do not meet: {first_line(exception)}") from exception


def split_arguments(num_ranks: int) -> dict[str, Any]:
    """What `from_pretrained` needs to load this rank's part, after `join`."""
    return {"distributed_config": DistributedConfig(tp_size=num_ranks, tp_plan="auto")}


def check_agreement(tokens: list[list[int]]) -> None:
    """Raise a RunError unless all ranks generated the same tokens. Every rank must call it; without ranks it passes."""
    digests = _gather(hashlib.sha256(repr(tokens).encode()).hexdigest())
    if len(set(digests)) > 1:
        raise RunError(
            "the ranks of tensor_parallel generated different tokens: their devices do not round alike\n"
            "(draft.placement=tensor_parallel splits the draft as well, and all ranks then see the same numbers)"
        )


def sum_over_ranks(number: int) -> int:
    """The sum of every rank's number, which every rank must give; without ranks the number itself."""
    return sum(_gather(number))


def _gather(value: Any) -> list[Any]:
    if _control is None:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(_control)
    dist.all_gather_object(values, value, group=_control)
    return values
