"""The facts for a placement: sketches, free bytes and the needs of a run.

No model is needed, so any machine can be pretended.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from harness.config.amounts import amount
from harness.config.errors import RunError
from harness.config.run import RunnerName
from harness.config.settings import ModelSettings, PlacementSettings
from harness.models.sketch import DeviceMap, Sketch, device_name
from harness.runners.static import round_up

# Bytes by device: a GPU's index or "cpu".
Memory = Mapping[int | str, int]


class Misfit(RunError):
    """A model for which there is no room: what it needs and what is free, in one line."""


class Needs(NamedTuple):
    """Memory for a model in addition to its weights.

    Attributes:
        tokens: cached over all rows.
        states: rows whose recurrent states are kept.
        graph_bytes: an estimate of what captured graphs take.
    """

    tokens: int
    states: int
    graph_bytes: int


@dataclass(frozen=True)
class Demand:
    """A run, as far as its memory depends on it.

    Attributes:
        batch_size: the most rows that are decoded at once.
        prompt_tokens: length of the longest prompt.
        num_draft_tokens: K, or the nodes of a tree; 0 without a draft.
    """

    batch_size: int
    prompt_tokens: int
    new_tokens: int
    num_draft_tokens: int
    runner: RunnerName

    @property
    def row_tokens(self) -> int:
        """Tokens of the longest row: its prompt, the new tokens and the draft tokens."""
        return self.prompt_tokens + self.new_tokens + self.num_draft_tokens

    def cached_tokens(self, runner: RunnerName, spare_slots: int | None = None) -> int:
        """The most tokens whose keys and values are kept for a row.

        Args:
            spare_slots: the spare slots of a head's own cache; None for a cache that a runner
                holds.
        """
        if spare_slots is not None:
            first_size = self.prompt_tokens + self.num_draft_tokens + spare_slots
            if self.row_tokens <= first_size:
                return first_size
            # The old buffer stays allocated until its contents have been copied.
            return 2 * self.row_tokens + spare_slots
        if runner == "eager":
            return self.row_tokens
        # The prompt is read into a separate cache and copied from there.
        return round_up(self.row_tokens + 1) + self.prompt_tokens

    def graph_bytes(self, sketch: Sketch, *, drafts: bool) -> int:
        """Estimate the memory of captured graphs: their results, and as much again to work in.

        A target's results are the logits of one token and of K + 1, each also with the verdict,
        which takes K distributions in float32. A draft's are those of one token and of two, each
        also with K such distributions.
        """
        num_draft_tokens = self.num_draft_tokens
        if drafts:
            num_logits = 3
            num_distributions = 2 * num_draft_tokens
        elif num_draft_tokens > 0:
            num_logits = 2 * (num_draft_tokens + 2)
            num_distributions = num_draft_tokens
        else:
            num_logits = 2
            num_distributions = 0
        bytes_per_token = num_logits * sketch.dtype.itemsize + 4 * num_distributions
        return 2 * self.batch_size * sketch.vocabulary_size * bytes_per_token


@dataclass(frozen=True)
class Placement:
    """Where one model is.

    Attributes:
        device_map: from module names to a GPU's index, `"cpu"` or `"disk"`; `""` is the whole
            model.
        bytes_per_device: weights and buffers, by `cuda:0`, `cpu` or `disk`.
        cache_per_device: keys, values and graphs, when they are largest.
        num_ranks: processes that hold the model. `device_map` is for this process, bytes are for
            all.
        split: whether each process has a part of every layer; otherwise each has a copy.
    """

    device_map: DeviceMap
    bytes_per_device: dict[str, int]
    cache_per_device: dict[str, int] = field(default_factory=dict)
    num_ranks: int = 1
    split: bool = False

    @property
    def devices(self) -> list[torch.device]:
        """Every device that computes layers; the CPU computes those on disk."""
        devices: dict[torch.device, None] = {}
        for device in self.device_map.values():
            name = device_name(device)
            devices[torch.device("cpu" if name == "disk" else name)] = None
        return list(devices)

    def taken(self, device: int | str) -> int:
        """Bytes of weights and caches on a device."""
        name = device_name(device)
        return self.bytes_per_device.get(name, 0) + self.cache_per_device.get(name, 0)

    def exceeds(self, room: Memory) -> bool:
        """Whether it takes more than there is on any device."""
        return any(self.taken(device) > size for device, size in room.items())


@dataclass(frozen=True)
class Case:
    """Models to be placed, and the machine. Without a GPU in `free` everything goes to the CPU.

    Attributes:
        models: the target, then the draft if it has weights of its own.
        placement: overridden by the models' own settings.
        shared: whether the target's weights also draft.
    """

    models: tuple[Sketch, ...]
    placement: PlacementSettings
    free: Memory
    demand: Demand
    shared: bool = False

    @property
    def gpus(self) -> list[int]:
        """All GPUs of the machine."""
        return sorted(device for device in self.free if isinstance(device, int))

    @property
    def room(self) -> dict[int | str, int]:
        """Bytes that may be used: on each GPU all but the reserve."""
        room = dict(self.free)
        for gpu in self.gpus:
            room[gpu] = max(0, room[gpu] - int(self.placement.reserve_gb * 1e9))
        return room

    def how(self, sketch: Sketch) -> PlacementSettings:
        """See `effective_placement`."""
        return effective_placement(sketch.role, sketch.settings, self.placement)

    def pool(self, sketch: Sketch) -> list[int]:
        """The GPUs that a model may use. Its own number of GPUs does not say which."""
        how = self.how(sketch)
        if how.strategy == "cpu":
            return []
        return self.gpus if sketch.settings.gpus else self.gpus[: how.gpus]

    def needs(self, sketch: Sketch, *, whole: bool, on_gpu: bool) -> Needs:
        """Memory for a model's caches and graphs.

        Args:
            whole: whether the model is on one device.
        """
        demand = self.demand
        drafts = [False, True] if self.shared else [sketch.role == "draft"]
        num_rows = len(drafts) * demand.batch_size
        if sketch.state_bytes:
            # A recurrent model has everything twice, before and after the draft tokens.
            num_states = num_rows * (2 if demand.num_draft_tokens else 1)
            return Needs(num_states * demand.row_tokens, num_states, graph_bytes=0)
        runner = self._runner(sketch, whole=whole, on_gpu=on_gpu)
        graph_bytes = 0
        if on_gpu and runner.startswith("graphs") and sketch.spare_slots is None:
            graph_bytes = sum(demand.graph_bytes(sketch, drafts=role) for role in drafts)
        tokens = num_rows * demand.cached_tokens(runner, sketch.spare_slots)
        return Needs(tokens, states=0, graph_bytes=graph_bytes)

    def _runner(self, sketch: Sketch, *, whole: bool, on_gpu: bool) -> RunnerName:
        runner = self.demand.runner
        if runner == "auto":
            runner = "graphs" if on_gpu else "static"
        in_8bit = "8bit" in (sketch.quantization, sketch.stored)
        if runner != "eager" and (in_8bit or not whole):
            # Such models are neither compiled nor captured.
            return "static"
        return runner

    def misfit(self, sketch: Sketch, room: Memory, num_ranks: int = 1) -> Misfit:
        """The error for a model that does not fit into the room it was offered."""
        on_gpu = "cpu" not in room
        number_format = str(sketch.dtype).removeprefix("torch.")
        if sketch.quantization != "none":
            number_format = sketch.quantization
        if num_ranks > 1:
            number_format += f" with {num_ranks} ranks"
        text = f"its weights need {amount(sketch.weight_bytes)} in {number_format}"
        needs = self.needs(sketch, whole=len(room) == 1, on_gpu=on_gpu)
        cache = sum(sketch.block_caches(needs.tokens, needs.states))
        if cache:
            text += f" and its KV cache {amount(cache + needs.graph_bytes)}"
        where = " next to the model" if sketch.role == "draft" else ""
        free = _describe_room(list(room.values()), on_gpu)
        return Misfit(f"{sketch.role}: {sketch.settings.name} does not fit{where}: {text}, {free}")


def _describe_room(sizes: list[int], on_gpu: bool) -> str:
    if not on_gpu:
        return f"{amount(sizes[0])} of main memory are free"
    count = "one GPU has" if len(sizes) == 1 else f"{len(sizes)} GPUs have"
    amounts = " + ".join(map(amount, sizes))
    if len(sizes) > 2 and len(set(sizes)) == 1:
        amounts = f"{amount(sizes[0])} each"
    return f"{count} {amounts} free beyond placement.reserve_gb"


def effective_placement(
    role: str, settings: ModelSettings, placement: PlacementSettings
) -> PlacementSettings:
    """The run's placement with a model's own settings; an explicit map is the target's alone."""
    strategy = placement.strategy_for(role, settings)
    device_map = placement.device_map if role == "model" else None
    if device_map is not None:
        devices = map(parse_device, device_map.values())
        if not any(isinstance(device, int) for device in devices):
            strategy = "cpu"
    gpus = settings.gpus or placement.gpus
    return replace(placement, strategy=strategy, gpus=gpus, device_map=device_map)


def parse_device(device: object) -> int | str:
    """`0`, `"0"` and `"cuda:0"` as 0; any other device unchanged."""
    text = str(device).removeprefix("cuda:")
    return int(text) if text.isdigit() else text
