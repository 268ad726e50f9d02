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
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.distributed import DistributedConfig

from harness.config.errors import RunError
from harness.config.machine import MEETING_FILE, world
from harness.models.failures import first_line

# Loading and compiling may take one rank minutes longer than another; a longer wait means a hung
# process.
_TIMEOUT = timedelta(minutes=10)
# torch's channel for messages between the ranks; None where the run has one process.
_group: dist.ProcessGroup | None = None


def join(device: torch.device, num_ranks: int) -> None:
    """Meet the other ranks, once per process: by NCCL on a GPU, by gloo on the CPU.

    Raises RunError if there are not that many processes, or they do not meet.
    """
    global _group
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
    # torch reads where the ranks meet from torchrun's variables, unless it is given here.
    meeting_point: dict[str, Any] = {}
    file = os.environ.get(MEETING_FILE)
    if file is not None:
        rank, size = world()
        meeting_point = {"init_method": f"file://{file}", "rank": rank, "world_size": size}
    try:
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            timeout=_TIMEOUT,
            device_id=device if on_gpu else None,
            **meeting_point,
        )
        # For messages, not for layers. On the CPU, so that nothing waits for a GPU.
        _group = dist.new_group(backend="gloo", timeout=_TIMEOUT)
    except (RuntimeError, ValueError) as exception:
        reason = first_line(exception)
        raise RunError(f"the ranks of tensor_parallel do not meet: {reason}") from exception


def split_arguments(num_ranks: int) -> dict[str, Any]:
    """Arguments for `from_pretrained` to load this rank's part, after `join`."""
    return {"distributed_config": DistributedConfig(tp_size=num_ranks, tp_plan="auto")}


class _Mesh(NamedTuple):
    """The ranks that a layer is split over, by the name of their group.

    Its collectives are operations that can be compiled and captured.
    """

    name: str
    rank: int
    size: int

    def add_up(self, parts: Tensor) -> Tensor:
        """Return the sum of all ranks' tensors."""
        collectives: Any = torch.ops._c10d_functional
        total: Tensor = collectives.all_reduce(parts, "sum", self.name)
        return collectives.wait_tensor(total)

    def join(self, part: Tensor, width: int) -> Tensor:
        """Return all ranks' parts [..., n] next to each other, [..., width]."""
        collectives: Any = torch.ops._c10d_functional
        missing = self.part_of(width) - part.shape[-1]
        if missing:
            part = nn.functional.pad(part, (0, missing))
        stacked = collectives.all_gather_into_tensor(part.contiguous(), self.size, self.name)
        parts: Tensor = collectives.wait_tensor(stacked).unflatten(0, (self.size, -1))
        return parts.movedim(0, -2).flatten(-2)[..., :width]

    def part_of(self, width: int) -> int:
        """Return how many rows or columns each rank holds; the last ranks may hold fewer."""
        return -(-width // self.size)


def _run_columns(module: nn.Linear, mesh: _Mesh, inputs: Tensor) -> Tensor:
    """Compute this rank's outputs alone."""
    return nn.functional.linear(inputs, module.weight, module.bias)


def _run_all_columns(module: nn.Linear, mesh: _Mesh, inputs: Tensor) -> Tensor:
    """Compute the outputs of all ranks, which split them."""
    outputs = nn.functional.linear(inputs, module.weight, module.bias)
    return mesh.join(outputs, module.out_features)


def _run_rows(module: nn.Linear, mesh: _Mesh, inputs: Tensor) -> Tensor:
    """Compute the outputs from this rank's inputs and those of the others."""
    total = mesh.add_up(nn.functional.linear(inputs, module.weight))
    return total if module.bias is None else total + module.bias


def _run_embedding(module: nn.Embedding, mesh: _Mesh, tokens: Tensor) -> Tensor:
    """Look tokens up in a vocabulary that the ranks split."""
    places = tokens - mesh.rank * mesh.part_of(module.num_embeddings)
    is_absent = (places < 0) | (places >= len(module.weight))
    states = nn.functional.embedding(places.masked_fill(is_absent, 0), module.weight)
    return mesh.add_up(states.masked_fill(is_absent.unsqueeze(-1), 0))


# By type of layer and style of transformers' plan. Of a weight [outputs, inputs] a rank has some of
# the outputs ("colwise"), or some of the inputs ("rowwise"), whose products the ranks add up.
_FORWARDS: dict[tuple[type[nn.Module], str | None], Callable[..., Tensor]] = {
    (nn.Linear, "colwise"): _run_columns,
    (nn.Linear, "colwise_gather_output"): _run_all_columns,
    (nn.Linear, "rowwise"): _run_rows,
    (nn.Embedding, "embedding_rowwise"): _run_embedding,
}


def compute_on_plain_parts(model: PreTrainedModel) -> None:
    """Let layers hold this rank's part as a plain tensor, and join parts by plain operations.

    transformers would convert it in every forward pass, which takes long and cannot be compiled.
    Layers of other types and styles stay as they are.
    """
    plan = model.tp_plan or {}
    parts: dict[nn.Parameter, nn.Parameter] = {}  # tied layers share them
    for name, module in model.named_modules():
        forward = _FORWARDS.get((type(module), plan.get(re.sub(r"\.\d+\.", ".*.", name))))
        # transformers has replaced the `forward` of a layer that it has split.
        if forward is None or "forward" not in vars(module):
            continue
        parameters = dict(module.named_parameters(recurse=False))
        if not all(hasattr(parameter, "device_mesh") for parameter in parameters.values()):
            continue
        group = parameters["weight"].device_mesh.get_group()
        mesh = _Mesh(group.group_name, dist.get_rank(group), dist.get_world_size(group))
        for key, parameter in parameters.items():
            if parameter not in parts:
                parts[parameter] = nn.Parameter(parameter.to_local(), requires_grad=False)
            setattr(module, key, parts[parameter])
        module.forward = partial(forward, module, mesh)


def of_rank_0(numbers: Tensor) -> Tensor:
    """Broadcast rank 0's numbers to every rank. Every rank must call it."""
    if _group is None or not numbers.numel():
        return numbers
    agreed = numbers.clone(memory_format=torch.contiguous_format)
    dist.broadcast(agreed, src=0, group=None if agreed.is_cuda else _group)
    return agreed


def of_every_rank(value: Any) -> list[Any]:
    """The values of all ranks, in their order. Every rank must call it."""
    if _group is None:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(_group)
    dist.all_gather_object(values, value, group=_group)
    return values


def check_agreement(tokens: list[list[int]]) -> None:
    """Raise a RunError unless all ranks generated the same tokens. Every rank must call it."""
    digests = of_every_rank(hashlib.sha256(repr(tokens).encode()).hexdigest())
    if len(set(digests)) > 1:
        raise RunError(
            "the ranks of tensor_parallel generated different tokens: their devices do not round"
            " alike\n(draft.placement=tensor_parallel splits the draft as well, and all ranks then"
            " see the same numbers)"
        )


def sum_over_ranks(number: int) -> int:
    """Add up the numbers of all ranks. Every rank must call it."""
    return sum(of_every_rank(number))
