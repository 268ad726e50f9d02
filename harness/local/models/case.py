"""The question whether models fit, as a value: a `Case` of their sizes, the run and the machine.

`fit(case)` answers it with a `Placement` for each model, or raises a `Misfit`. A case holds numbers
alone, so that every what-if is the same question about a changed case: `plan gpus=4
gpu_memory=40GB` changes `free`, advice changes one setting at a time (`remedies`), and `force=true`
enlarges the memory.

    case = Case((target, draft), placement, free={0: 24 * GB, "cpu": 64 * GB}, demand=demand)
    fit(case)                                                         # on one GPU of 24 GB
    fit(replace(case, free={0: 24 * GB, 1: 24 * GB, "cpu": 64 * GB})) # and on two?
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from harness.config.amounts import amount
from harness.config.demand import Demand
from harness.config.errors import RunError
from harness.config.run import RunnerName
from harness.config.settings import PlacementSettings, Strategy
from harness.local.models.sketch import Device, DeviceMap, Sketch, device_name

# Bytes by device.
Memory = Mapping[Device, int]


class Misfit(RunError):
    """A model for which there is no room: what it needs and what is free, in one line."""


class Needs(NamedTuple):
    """What a model needs memory for in addition to its weights.

    Attributes:
        tokens: how many tokens' keys and values are kept, over all rows.
        states: how many recurrent states are kept, one or two for a row; 0 for most models.
        graph_bytes: an estimate of what CUDA graphs of compiled passes take.
    """

    tokens: int
    states: int
    graph_bytes: int


@dataclass(frozen=True)
class Placement:
    """Where one model is.

    Attributes:
        device_map: from module names to devices; `""` is the whole model.
        bytes_per_device: weights and buffers, by `cuda:0`, `cpu` or `disk`.
        cache_per_device: keys, values and graphs, when they are largest.
    """

    device_map: DeviceMap
    bytes_per_device: dict[str, int]
    cache_per_device: dict[str, int] = field(default_factory=dict)

    @property
    def devices(self) -> list[torch.device]:
        """Every device that computes layers; the CPU computes those on disk."""
        devices: dict[torch.device, None] = {}
        for device in self.device_map.values():
            name = device_name(device)
            devices[torch.device("cpu" if name == "disk" else name)] = None
        return list(devices)

    def taken(self, device: Device) -> int:
        """Bytes of weights and caches on a device."""
        name = device_name(device)
        return self.bytes_per_device.get(name, 0) + self.cache_per_device.get(name, 0)


@dataclass(frozen=True)
class Case:
    """Models to be placed, the machine, and the run.

    Attributes:
        models: the target, then the draft if it has weights or a cache of its own.
        placement: of both models; an explicit map is the target's alone.
        free: bytes on each GPU that may be used, and in main memory (`"cpu"`). Without a GPU
            everything goes to the CPU.
        shared: whether the target itself is the draft, by settings that are equal: its weights are
            there once, its caches and graphs twice.
    """

    models: tuple[Sketch, ...]
    placement: PlacementSettings
    free: Memory
    demand: Demand
    shared: bool = False

    @property
    def spread(self) -> Case:
        """The case of models on several GPUs: a head copies the matrices that it borrows."""
        models = [
            replace(sketch, blocks=(*sketch.blocks, *sketch.copied)) for sketch in self.models
        ]
        return replace(self, models=tuple(models))

    @property
    def gpus(self) -> list[int]:
        """All GPUs of the machine."""
        return sorted(device for device in self.free if isinstance(device, int))

    @property
    def room(self) -> dict[Device, int]:
        """Bytes that may be filled: on each GPU all free ones but the reserve."""
        room = dict(self.free)
        for gpu in self.gpus:
            room[gpu] = max(0, room[gpu] - self.reserve_bytes)
        return room

    @property
    def reserve_bytes(self) -> int:
        """Bytes that stay free on each GPU: `placement.reserve_gb`, or more where the prompts need
        more to be read.
        """
        return max(int(self.placement.reserve_gb * 1e9), self._prompt_bytes)

    def step_bytes(self, sketch: Sketch, tokens_of_a_row: int = 1) -> float:
        """The bytes that one pass of a model reads.

        Args:
            tokens_of_a_row: 1 for a step, K + 1 for a verification.
        """
        demand = self.demand
        # An average pass finds half of the new tokens in the cache.
        tokens = demand.batch_size * (demand.prompt_tokens + demand.new_tokens // 2)
        cache = sketch.read_cache_bytes(tokens, demand.batch_size)
        weights = sketch.read_bytes(demand.batch_size * tokens_of_a_row)
        return weights + cache

    @property
    def _prompt_bytes(self) -> int:
        # The models read one after the other.
        return max(_prompt_bytes(self.demand, sketch) for sketch in self.models)

    @property
    def strategy(self) -> Strategy:
        """`cpu` also where an explicit map names no GPU."""
        return effective_strategy(self.placement)

    def gpus_for(self, sketch: Sketch) -> list[int]:
        """The GPUs that a model may use; all of them if it has a number of its own.

        `placement.gpus=2` means the first two GPUs, `model.gpus=2` any two.
        """
        if self.strategy == "cpu":
            return []
        return self.gpus if sketch.settings.gpus else self.gpus[: self.placement.gpus]

    def needs(self, sketch: Sketch, *, whole: bool, on_gpu: bool) -> Needs:
        """What a model needs for its caches and graphs.

        Args:
            whole: whether the model is on one device.
            on_gpu: whether its first layers are on a GPU.
        """
        demand = self.demand
        roles = ["model", "draft"] if self.shared else [sketch.role]
        num_rows = len(roles) * demand.batch_size
        if sketch.state_bytes:
            # A recurrent model has everything twice, before and after the draft tokens.
            num_states = num_rows * (2 if demand.num_draft_tokens else 1)
            return Needs(num_states * demand.row_tokens, num_states, graph_bytes=0)
        runner = self._runner(sketch, whole=whole, on_gpu=on_gpu)
        graph_bytes = 0
        if on_gpu and runner == "compiled":
            graph_bytes = sum(_graph_bytes(demand, sketch, role) for role in roles)
        tokens = num_rows * demand.cached_tokens(runner, sketch.spare_slots)
        return Needs(tokens, states=0, graph_bytes=graph_bytes)

    def _runner(self, sketch: Sketch, *, whole: bool, on_gpu: bool) -> RunnerName:
        """The runner that a model will have, as far as that decides what it caches."""
        runner = self.demand.runner
        if runner == "auto":
            runner = "compiled" if on_gpu else "static"
        in_8bit = "8bit" in (sketch.quantization, sketch.stored)
        if runner != "eager" and (in_8bit or not whole):
            # Such models are not compiled.
            return "static"
        return runner

    def misfit(self, sketch: Sketch, room: Memory) -> Misfit:
        """The error for a model that does not fit into the room it was offered."""
        on_gpu = "cpu" not in room
        number_format = str(sketch.dtype).removeprefix("torch.")
        if sketch.quantization != "none":
            number_format = sketch.quantization
        text = f"its weights need {amount(sketch.weight_bytes)} in {number_format}"
        needs = self.needs(sketch, whole=len(room) == 1, on_gpu=on_gpu)
        cache = sum(sketch.block_caches(needs.tokens, needs.states))
        if cache:
            text += f" and its KV cache {amount(cache + needs.graph_bytes)}"
        where = " next to the model" if sketch.role == "draft" else ""
        reserve = "placement.reserve_gb"
        if self._prompt_bytes > self.placement.reserve_gb * 1e9:
            reserve = f"the {amount(self.reserve_bytes)} that reading the prompts takes"
        free = _describe_room(list(room.values()), on_gpu, reserve)
        return Misfit(f"{sketch.role}: {sketch.settings.name} does not fit{where}: {text}, {free}")


def _prompt_bytes(demand: Demand, sketch: Sketch) -> int:
    """Estimate what reading all prompts at once takes beyond weights and caches: a layer's work,
    and logits after each prompt, in float32 too.
    """
    num_tokens = demand.batch_size * demand.prompt_tokens
    layer = num_tokens * sketch.pass_numbers * sketch.dtype.itemsize
    return layer + demand.batch_size * sketch.vocabulary_size * (sketch.dtype.itemsize + 4)


def _graph_bytes(demand: Demand, sketch: Sketch, role: str) -> int:
    """Estimate the memory of CUDA graphs: their results, and as much again to work in.

    A target's results are the logits of one token and of K + 1, a draft's those of one token and of
    two; a head's are K distributions in float32, too.
    """
    num_draft_tokens = demand.num_draft_tokens
    num_distributions = 0
    if role == "draft":
        num_logits = 3
        if sketch.spare_slots is not None:
            num_distributions = num_draft_tokens
    else:
        num_logits = num_draft_tokens + 2 if num_draft_tokens else 1
    bytes_per_token = num_logits * sketch.dtype.itemsize + 4 * num_distributions
    return 2 * demand.batch_size * sketch.vocabulary_size * bytes_per_token


def _describe_room(sizes: list[int], on_gpu: bool, reserve: str) -> str:
    if not on_gpu:
        return f"{amount(sizes[0])} of main memory are free"
    count = "one GPU has" if len(sizes) == 1 else f"{len(sizes)} GPUs have"
    amounts = " + ".join(map(amount, sizes))
    if len(sizes) > 2 and len(set(sizes)) == 1:
        amounts = f"{amount(sizes[0])} each"
    return f"{count} {amounts} free beyond {reserve}"


def effective_strategy(placement: PlacementSettings) -> Strategy:
    """The strategy of a placement: `cpu` also where its explicit map names no GPU."""
    devices = map(parse_device, (placement.device_map or {}).values())
    if placement.device_map is not None and not any(isinstance(device, int) for device in devices):
        return "cpu"
    return placement.strategy


def parse_device(device: object) -> Device:
    """A device as it is typed: `0`, `"0"` and `"cuda:0"` are GPU 0; any other word stays."""
    text = str(device).removeprefix("cuda:")
    return int(text) if text.isdigit() else text
