"""Layers split over several processes, the ranks, by transformers' own `tp_plan`.

All ranks run the same program on the same numbers: randomness is data, and `of_rank_0` broadcasts
rank 0's decisions to the others. A model that is not split is a copy on every rank.

A rank reads its number from the variables that `torchrun` sets, RANK and WORLD_SIZE. Where the ranks meet is in
MASTER_ADDR and MASTER_PORT under torchrun, and in a file's name where our own sweep started them.
"""

from __future__ import annotations

import hashlib
import os
import re
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.distributed import DistributedConfig

from harness.config.errors import RunError
from harness.config.machine import MEETING_FILE
from harness.models.failures import first_line

# Loading may take one rank minutes longer than another; a longer wait means a hung process.
_TIMEOUT = timedelta(minutes=10)
# Ranks finish a generation within one forward of each other.
_AGREEMENT_TIMEOUT = timedelta(minutes=1)

# For messages between the ranks; layers use another group. On the CPU, so that nothing waits for a
# GPU.
_control: dist.ProcessGroup | None = None


class World(NamedTuple):
    """This process among the ranks; without ranks it is the only one."""

    rank: int
    size: int


def world() -> World:
    """The rank of this process, and the number of ranks."""
    return World(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))


def join(device: torch.device, num_ranks: int) -> None:
    """Meet the other ranks, once per process: by NCCL on a GPU, by gloo on the CPU.

    Raises RunError if there are not that many processes, or they do not meet.
    """
    global _control
    if world().size != num_ranks:
        reason = f"tensor_parallel needs {num_ranks} processes, this is one of {world().size}"
        raise RunError(f"{reason}: run it by the command line, or by torchrun")
    if dist.is_initialized():
        return
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    elif "OMP_NUM_THREADS" not in os.environ:
        # The ranks share the cores.
        torch.set_num_threads(max(1, torch.get_num_threads() // world().size))
    try:
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            timeout=_TIMEOUT,
            device_id=device if on_gpu else None,
            **_meeting_point(),
        )
        _control = dist.new_group(backend="gloo", timeout=_AGREEMENT_TIMEOUT)
    except (RuntimeError, ValueError) as exception:
        reason = first_line(exception)
        raise RunError(f"the ranks of tensor_parallel do not meet: {reason}") from exception


def _meeting_point() -> dict[str, Any]:
    """Arguments that say where the ranks meet; none where torch reads that from torchrun's variables."""
    file = os.environ.get(MEETING_FILE)
    if file is None:
        return {}
    rank, size = world()
    return {"init_method": f"file://{file}", "rank": rank, "world_size": size}


def split_arguments(num_ranks: int) -> dict[str, Any]:
    """Arguments for `from_pretrained` to load this rank's part, after `join`."""
    return {"distributed_config": DistributedConfig(tp_size=num_ranks, tp_plan="auto")}


def compute_on_plain_parts(model: PreTrainedModel) -> None:
    """Let linear layers hold this rank's part as a plain tensor.

    transformers would convert it in every forward pass. Layers that gather their outputs or add a
    bias to a sum, and layers that are not linear, stay as they are.
    """
    plan = model.tp_plan or {}
    for name, module in model.named_modules():
        if not _is_split_linear(module):
            continue
        style = plan.get(re.sub(r"\.\d+\.", ".*.", name))
        parameters = dict(module.named_parameters(recurse=False))
        if style != "colwise" and (style != "rowwise" or len(parameters) > 1):
            continue
        mesh: Any = parameters["weight"].device_mesh
        for key, parameter in parameters.items():
            local: Any = parameter.to_local()
            setattr(module, key, nn.Parameter(local, requires_grad=False))
        del module.forward
        if style == "rowwise":
            module.register_forward_hook(partial(_add_up, mesh.get_group()))


def _is_split_linear(module: nn.Module) -> bool:
    if type(module) is not nn.Linear or not hasattr(module.weight, "device_mesh"):
        return False
    # transformers has replaced its `forward`.
    return "forward" in vars(module)


def _add_up(group: dist.ProcessGroup, module: nn.Module, inputs: Any, output: Tensor) -> None:
    dist.all_reduce(output, group=group)


def of_rank_0(numbers: Tensor) -> Tensor:
    """Broadcast rank 0's numbers to every rank. Every rank must call it."""
    if _control is None or not numbers.numel():
        return numbers
    agreed = numbers.clone(memory_format=torch.contiguous_format)
    dist.broadcast(agreed, src=0, group=None if agreed.is_cuda else _control)
    return agreed


def check_agreement(tokens: list[list[int]]) -> None:
    """Raise a RunError unless all ranks generated the same tokens. Every rank must call it."""
    digests = _gather(hashlib.sha256(repr(tokens).encode()).hexdigest())
    if len(set(digests)) > 1:
        raise RunError(
            "the ranks of tensor_parallel generated different tokens: their devices do not round"
            " alike\n(draft.placement=tensor_parallel splits the draft as well, and all ranks then"
            " see the same numbers)"
        )


def sum_over_ranks(number: int) -> int:
    """Add up the numbers of all ranks. Every rank must call it."""
    return sum(_gather(number))


def _gather(value: Any) -> list[Any]:
    if _control is None:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(_control)
    dist.all_gather_object(values, value, group=_control)
    return values
