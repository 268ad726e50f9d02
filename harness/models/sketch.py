"""A model as numbers: the size of each tensor, and where the model may be split.

Whether it fits, where its layers go and what a step reads is arithmetic on these numbers (`fit`, `roofline`).
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from harness.config.settings import ModelSettings, Quantization

# From module names to a GPU's index, "cpu" or "disk"; "" is the whole model.
DeviceMap = Mapping[str, int | str]


@dataclass(frozen=True)
class Part:
    """A tensor.

    Attributes:
        count: of its numbers.
        itemsize: bytes of each; None for the model's dtype.
        outputs: rows of a matrix that bitsandbytes would quantize; 0 for any other tensor.
        read: share of it that a forward pass reads: 0 for embeddings that are looked up, less than 1 for experts.
        split: length of the dimension along which ranks share it; 0 for what each rank has in full.
    """

    name: str
    count: int
    itemsize: int | None = None
    outputs: int = 0
    read: float = 1.0
    split: int = 0

    def nbytes(self, dtype: torch.dtype, quantization: Quantization) -> int:
        """Bytes as held, scales of quantized matrices included."""
        if not self.outputs or quantization == "none":
            return self.count * (self.itemsize or dtype.itemsize)
        return (
            eight_bit_bytes(self.count, self.outputs)
            if quantization == "8bit"
            else four_bit_bytes(self.count)
        )


@dataclass(frozen=True)
class Block:
    """What must be on one device: a layer, an embedding, a matrix tied to one.

    Attributes:
        modules: their names, for a device map.
        caches: by module, numbers of keys and values for one token of one row, and bytes of a row's recurrent state.
    """

    modules: tuple[str, ...]
    parts: tuple[Part, ...]
    caches: Mapping[str, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Sketch:
    """A model before its weights load.

    Attributes:
        dtype: of what is not quantized.
        blocks: in the order in which they may be shared out among devices.
        quantization: what bitsandbytes does while loading.
        stored: how the repository's own weights are quantized; None where they are not.
        num_parameters: of the architecture, quantized or not; shared tensors once.
        modules: names of all, the empty one included.
        heads: their number by kind.
        tp_plan: whether transformers can split it over ranks, and
        splits_cache: whether each rank then keeps the keys and values of its own heads alone.
        slots: by which its own cache grows, of a head; 0 where a runner holds the cache.
        borrowed: bytes of the target's weights that each of its passes reads too.
        one_pass: whether one pass drafts all tokens.
        estimated_cache: whether `caches` follow from the configuration, because the model's code does not tell them.
    """

    role: str
    settings: ModelSettings
    dtype: torch.dtype
    blocks: tuple[Block, ...]
    quantization: Quantization = "none"
    stored: str | None = None
    num_parameters: int = 0
    vocabulary_size: int = 0
    class_name: str = ""
    modules: frozenset[str] = frozenset([""])
    heads: Mapping[str, int] = field(default_factory=dict)
    tp_plan: bool = False
    splits_cache: bool = False
    slots: int = 0
    borrowed: int = 0
    one_pass: bool = False
    estimated_cache: bool = False

    @functools.cached_property
    def block_bytes(self) -> list[int]:
        """Weights and buffers of each block."""
        return [
            sum(part.nbytes(self.dtype, self.quantization) for part in block.parts)
            for block in self.blocks
        ]

    @functools.cached_property
    def plain_bytes(self) -> list[int]:
        """The same outside the GPUs, where bitsandbytes does not quantize."""
        return [
            sum(part.nbytes(self.dtype, "none") for part in block.parts) for block in self.blocks
        ]

    def block_caches(self, tokens: int = 1, states: int = 1) -> list[int]:
        """Bytes of each block's keys and values for so many tokens, and of so many rows' recurrent states."""
        size = self.dtype.itemsize
        return [
            sum(tokens * n * size + states * own for n, own in block.caches.values())
            for block in self.blocks
        ]

    @property
    def weight_bytes(self) -> int:
        """Weights and buffers of all blocks."""
        return sum(self.block_bytes)

    @property
    def cache_bytes(self) -> int:
        """Keys and values of all blocks for one token of one row."""
        return sum(self.block_caches(states=0))

    @property
    def state_bytes(self) -> int:
        """The recurrent state of one row; with `cache_bytes` 0 where the model's code does not tell."""
        return sum(self.block_caches(tokens=0))

    @property
    def knows_cache(self) -> bool:
        """Whether anything tells what is kept of each token; what is not known is no zero."""
        return bool(self.slots or self.cache_bytes or self.state_bytes)

    @property
    def about_cache(self) -> str | None:
        """A sentence about a cache whose size the model's code does not tell; None for any other."""
        silent = (
            f"the code of {self.role}={self.settings.name} does not tell the size of its KV cache"
        )
        if not self.knows_cache:
            return f"{silent}, nor does its configuration: it is not counted"
        if self.estimated_cache:
            return f"{silent}: it is estimated from the configuration"
        return None

    @property
    def read_bytes(self) -> int:
        """What a forward pass reads of weights, wherever they are."""
        return sum(self.weights_on({"": 0}, read=True).values()) + self.borrowed

    def weights_on(self, device_map: DeviceMap, *, read: bool = False) -> dict[str, int]:
        """Bytes of weights and buffers by `cuda:0`, `cpu` or `disk`; only those that a forward pass reads if `read`."""
        total: Counter[str] = Counter()
        for part in (part for block in self.blocks for part in block.parts):
            place = device_map[covering(part.name, device_map)]
            plain = offloads(device_map) and not isinstance(place, int)
            size = part.nbytes(self.dtype, "none" if plain else self.quantization)
            total[device_name(place)] += round(part.read * size) if read else size
        return {name: size for name, size in total.items() if size}

    def caches_on(self, device_map: DeviceMap, tokens: int = 1, states: int = 1) -> dict[str, int]:
        """The same of `block_caches`; those of offloaded layers are on the first GPU."""
        first = next((place for place in device_map.values() if isinstance(place, int)), "cpu")
        total: Counter[str] = Counter()
        for module, (numbers, own) in (
            cache for block in self.blocks for cache in block.caches.items()
        ):
            place = device_map[covering(module, device_map)]
            size = tokens * numbers * self.dtype.itemsize + states * own
            total[device_name(place if isinstance(place, int) else first)] += size
        return dict(total)

    def rank_bytes(self, num_ranks: int) -> int:
        """Bytes of the rank that holds most: its part of what is split, the rest in full."""
        sizes = [
            (part.split, part.nbytes(self.dtype, "none"))
            for block in self.blocks
            for part in block.parts
        ]
        return sum(
            round(size * math.ceil(length / num_ranks) / length) if length else size
            for length, size in sizes
        )


def eight_bit_bytes(count: int, outputs: int) -> int:
    """Bytes of so many weights in LLM.int8(): int8, and one float32 scale for each output."""
    return count + 4 * outputs


def four_bit_bytes(count: int, block_size: int = 64, *, nested: bool = True) -> int:
    """Bytes of so many weights in NF4; `nested` if the scales, one per `block_size` weights, are quantized as well."""
    blocks = math.ceil(count / block_size)
    # Scales in float32; or in 8 bits, for every 256 of them a float32 scale, their offset and a table of 256 values.
    scales = blocks + 4 * math.ceil(blocks / 256) + 4 + 256 * 4 if nested else 4 * blocks
    # Two weights to a byte, and the 16 values that they stand for, in float32.
    return math.ceil(count / 2) + 16 * 4 + scales


def covering(name: str, device_map: DeviceMap) -> str:
    """The key of `device_map` that decides about the tensor or module `name`, its longest prefix; KeyError for none."""
    key = name
    while key not in device_map:
        if not key:
            raise KeyError(name)
        key = key.rpartition(".")[0]
    return key


def device_name(device: int | str) -> str:
    """`cuda:0` for a GPU's index; `cpu` and `disk` as they are."""
    return f"cuda:{device}" if isinstance(device, int) else device


def offloads(device_map: DeviceMap) -> bool:
    """Whether some layers are elsewhere than where they are computed."""
    places = set(device_map.values())
    return "disk" in places or ("cpu" in places and len(places) > 1)
