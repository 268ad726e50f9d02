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

import torch

from harness.config.amounts import amount
from harness.config.demand import Demand
from harness.config.errors import RunError
from harness.config.settings import PlacementSettings, Strategy
from harness.local.models.sketch import Device, DeviceMap, Sketch, device_name

# Bytes by device.
Memory = Mapping[Device, int]


class Misfit(RunError):
    """A model for which there is no room: what it needs and what is free, in one line."""


@dataclass(frozen=True)
class Placement:
    """Where one model is.

    Attributes:
        device_map: from module names to devices; `""` is the whole model.
        bytes_per_device: weights and buffers, by `cuda:0`, `cpu` or `disk`.
        cache_per_device: keys and values, when they are largest.
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
            there once, its caches twice.
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
            replace(sketch, blocks=(*sketch.blocks, *sketch.copied), copied=())
            for sketch in self.models
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
        return max(int(self.placement.reserve_gb * 1e9), self.prompt_bytes)

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
    def prompt_bytes(self) -> int:
        """What reading all prompts takes; the models read them one after the other."""
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

    def cached(self, sketch: Sketch) -> tuple[int, int]:
        """How many tokens' keys and values a model keeps, over all rows, and how many recurrent
        states; 0 of these for most models.
        """
        demand = self.demand
        num_rows = demand.batch_size * (2 if self.shared else 1)
        if sketch.state_bytes:
            # A recurrent model has everything twice, before and after the draft tokens.
            num_states = num_rows * (2 if demand.num_draft_tokens else 1)
            return num_states * demand.row_tokens, num_states
        return num_rows * demand.cached_tokens(sketch.spare_slots), 0

    def misfit(self, sketch: Sketch, room: Memory) -> Misfit:
        """The error for a model that does not fit into the room it was offered."""
        on_gpu = "cpu" not in room
        number_format = str(sketch.dtype).removeprefix("torch.")
        if sketch.quantization != "none":
            number_format = sketch.quantization
        text = f"its weights need {amount(sketch.weight_bytes)} in {number_format}"
        cache = sum(sketch.block_caches(*self.cached(sketch)))
        if cache:
            text += f" and its KV cache {amount(cache)}"
        where = " next to the model" if sketch.role == "draft" else ""
        reserve = "placement.reserve_gb"
        if self.prompt_bytes > self.placement.reserve_gb * 1e9:
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
