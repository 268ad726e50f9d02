"""A model as numbers: the size of each tensor, and where the model may be split.

Whether it fits, where its layers go and how much a step reads is arithmetic on these numbers
(`fit`, `roofline`).
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Container, Mapping
from dataclasses import dataclass, field

import torch

from harness.config.settings import ModelSettings, Quantization

# From module names to a GPU's index, "cpu" or "disk"; "" is the whole model.
DeviceMap = Mapping[str, int | str]


@dataclass(frozen=True)
class TensorSketch:
    """A parameter or buffer as numbers.

    Attributes:
        count: how many numbers it has.
        itemsize: bytes of each number; None for the model's dtype.
        outputs: rows of a matrix that bitsandbytes would quantize; 0 for any other tensor.
        read: share that a forward pass of one token reads: 0 for embeddings that are looked up, less
            than 1 for experts.
        split: length of the dimension along which ranks share it; 0 if each rank has all of it.
    """

    name: str
    count: int
    itemsize: int | None = None
    outputs: int = 0
    read: float = 1.0
    split: int = 0

    def read_share(self, num_tokens: int) -> float:
        """Share that a forward pass of so many tokens reads, if each chooses its experts by itself.

        Of E experts with k for each token these are E (1 − (1 − k/E)^n) in expectation; texts whose
        tokens agree on experts read fewer.
        """
        return 1 - (1 - self.read) ** num_tokens

    def nbytes(self, dtype: torch.dtype, quantization: Quantization) -> int:
        """Bytes in memory, scales of quantized matrices included."""
        if self.outputs and quantization == "8bit":
            return eight_bit_bytes(self.count, self.outputs)
        if self.outputs and quantization == "4bit":
            return four_bit_bytes(self.count)
        return self.count * (self.itemsize or dtype.itemsize)


@dataclass(frozen=True)
class LayerCache:
    """Memory that one layer needs for each row.

    Attributes:
        module: name of the module that fills it.
        token_numbers: numbers of keys and values for one token.
        state_bytes: size of the recurrent state.
    """

    module: str = ""
    token_numbers: int = 0
    state_bytes: int = 0

    def nbytes(self, dtype: torch.dtype, tokens: int, states: int) -> int:
        """Bytes of so many tokens and so many rows' states."""
        return tokens * self.token_numbers * dtype.itemsize + states * self.state_bytes


@dataclass(frozen=True)
class Block:
    """A layer, an embedding or another piece that stays on one device, tied pieces included.

    Attributes:
        modules: names for a device map.
    """

    modules: tuple[str, ...]
    tensors: tuple[TensorSketch, ...]
    caches: tuple[LayerCache, ...] = ()


@dataclass(frozen=True)
class Sketch:
    """A model before its weights load.

    Attributes:
        dtype: format of everything that is not quantized.
        blocks: in the order in which they are placed on devices.
        quantization: applied by bitsandbytes while loading.
        stored: quantization of the repository's own weights; None for none.
        num_parameters: of the architecture, quantized or not; shared tensors count once.
        modules: names of all modules, the empty one included.
        heads: numbers of heads by kind.
        tp_plan: whether transformers can split the model over ranks.
        splits_cache: whether each rank keeps the keys and values of its own heads alone.
        slots: step in which a head's own cache grows; 0 if a runner holds the cache.
        borrowed: bytes of the target's weights that each pass reads too.
        one_pass: whether one pass drafts all tokens.
        estimated_cache: whether caches follow from the configuration because the model's code does
            not tell them.
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

    @property
    def tensors(self) -> list[TensorSketch]:
        """The tensors of all blocks."""
        return [tensor for block in self.blocks for tensor in block.tensors]

    @functools.cached_property
    def block_bytes(self) -> list[int]:
        """Weights and buffers of each block."""
        return self._block_bytes(self.quantization)

    @functools.cached_property
    def plain_bytes(self) -> list[int]:
        """The same outside the GPUs, where bitsandbytes does not quantize."""
        return self._block_bytes("none")

    def _block_bytes(self, quantization: Quantization) -> list[int]:
        sizes = []
        for block in self.blocks:
            sizes.append(sum(tensor.nbytes(self.dtype, quantization) for tensor in block.tensors))
        return sizes

    def block_caches(self, tokens: int = 1, states: int = 1) -> list[int]:
        """Bytes of each block's caches, for so many tokens and so many rows' recurrent states."""
        sizes = []
        for block in self.blocks:
            sizes.append(sum(cache.nbytes(self.dtype, tokens, states) for cache in block.caches))
        return sizes

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
        """The recurrent state of one row."""
        return sum(self.block_caches(tokens=0))

    @property
    def knows_cache(self) -> bool:
        """Whether the size of the cache is known at all; an unknown size is not zero."""
        return bool(self.slots or self.cache_bytes or self.state_bytes)

    @property
    def about_cache(self) -> str | None:
        """A sentence about a cache whose size is unknown or estimated; None for any other."""
        silent = (
            f"the code of {self.role}={self.settings.name} does not tell the size of its KV cache"
        )
        if not self.knows_cache:
            return f"{silent}, nor does its configuration: it is not counted"
        if self.estimated_cache:
            return f"{silent}: it is estimated from the configuration"
        return None

    def read_bytes(self, num_tokens: int = 1) -> int:
        """Bytes of weights that a forward pass of so many tokens reads, wherever they are."""
        return sum(self.weights_on({"": 0}, read_by=num_tokens).values()) + self.borrowed

    def weights_on(self, device_map: DeviceMap, *, read_by: int | None = None) -> dict[str, int]:
        """Bytes of weights and buffers by `cuda:0`, `cpu` or `disk`.

        Args:
            read_by: count only what a forward pass of so many tokens reads; None counts all.
        """
        offloaded = offloads(device_map)
        total: Counter[str] = Counter()
        for tensor in self.tensors:
            device = device_map[covering(tensor.name, device_map)]
            plain = offloaded and not isinstance(device, int)
            size = tensor.nbytes(self.dtype, "none" if plain else self.quantization)
            share = 1.0 if read_by is None else tensor.read_share(read_by)
            total[device_name(device)] += round(share * size)
        return {name: size for name, size in total.items() if size}

    def caches_on(self, device_map: DeviceMap, tokens: int = 1, states: int = 1) -> dict[str, int]:
        """Bytes of caches by device; those of offloaded layers are on the first GPU."""
        gpus = [device for device in device_map.values() if isinstance(device, int)]
        elsewhere = gpus[0] if gpus else "cpu"
        total: Counter[str] = Counter()
        for block in self.blocks:
            for cache in block.caches:
                device = device_map[covering(cache.module, device_map)]
                name = device_name(device if isinstance(device, int) else elsewhere)
                total[name] += cache.nbytes(self.dtype, tokens, states)
        return dict(total)

    def rank_bytes(self, num_ranks: int) -> int:
        """Bytes of the rank with the most: its part of split tensors, and all other tensors."""
        total = 0
        for tensor in self.tensors:
            size = tensor.nbytes(self.dtype, "none")
            if tensor.split:
                longest = math.ceil(tensor.split / num_ranks)
                size = round(size * longest / tensor.split)
            total += size
        return total


def eight_bit_bytes(count: int, outputs: int) -> int:
    """Bytes of so many weights in LLM.int8(): int8, and one float32 scale for each output."""
    return count + 4 * outputs


def four_bit_bytes(count: int, block_size: int = 64, *, nested: bool = True) -> int:
    """Bytes of so many weights in NF4, with a scale for every `block_size` of them.

    `nested` if the scales are quantized as well.
    """
    num_scales = math.ceil(count / block_size)
    scales = 4 * num_scales
    if nested:
        # In 8 bits; every 256 of them share a float32 scale, and all share an offset and a table of
        # 256 values.
        scales = num_scales + 4 * math.ceil(num_scales / 256) + 4 + 256 * 4
    # Two weights to a byte, and the 16 values that they stand for, in float32.
    return math.ceil(count / 2) + 16 * 4 + scales


def covering(name: str, modules: Container[str]) -> str:
    """The longest of `modules` that holds the tensor or module `name`; KeyError if none does."""
    key = name
    while key not in modules:
        if not key:
            raise KeyError(name)
        key = key.rpartition(".")[0]
    return key


def device_name(device: int | str) -> str:
    """`cuda:0` for a GPU's index; `cpu` and `disk` as they are."""
    return f"cuda:{device}" if isinstance(device, int) else device


def offloads(device_map: DeviceMap) -> bool:
    """Whether some layers are stored on another device than the one that computes them."""
    devices = set(device_map.values())
    return "disk" in devices or ("cpu" in devices and len(devices) > 1)
