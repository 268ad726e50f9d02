"""A model as numbers: the size of each tensor, and where the model may be split.

`meta.sketch_model` makes a sketch before any weights load. Whether the model fits, where its layers
go (`fit`) and how much a step reads (`engine/planning.py`) is arithmetic on its numbers.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Container, Mapping
from dataclasses import dataclass

import torch

from harness.config.settings import ModelSettings, Quantization

# A GPU's index, "cpu" or "disk".
Device = int | str
# From module names to devices; "" is the whole model.
DeviceMap = Mapping[str, Device]


@dataclass(frozen=True)
class TensorSketch:
    """A parameter or buffer as numbers.

    Attributes:
        count: how many numbers it has.
        itemsize: bytes of each number; None for the model's dtype.
        outputs: rows of a matrix that bitsandbytes would quantize; 0 for any other tensor.
        read_per_token: share that a forward pass of one token reads: 0 for embeddings that are
            looked up, less than 1 for experts.
    """

    name: str
    count: int
    itemsize: int | None = None
    outputs: int = 0
    read_per_token: float = 1.0

    def nbytes(self, dtype: torch.dtype, quantization: Quantization) -> int:
        """Return the bytes in memory, scales of quantized matrices included."""
        if self.outputs and quantization == "8bit":
            return eight_bit_bytes(self.count, self.outputs)
        if self.outputs and quantization == "4bit":
            return four_bit_bytes(self.count)
        return self.count * (self.itemsize or dtype.itemsize)

    def read_share(self, num_tokens: int) -> float:
        """Return the share that a pass of so many tokens reads.

        If each token chooses its own experts: of E experts with k for each token, n tokens read
        E (1 − (1 − k/E)^n) in expectation. Texts whose tokens agree on experts read fewer.
        """
        return 1 - (1 - self.read_per_token) ** num_tokens


@dataclass(frozen=True)
class LayerCache:
    """The size of one layer's cache: for each token of each row, and of a row's recurrent state.

    Attributes:
        module: name of the module that fills it; empty until `meta` has matched the caches with
            the model's layers.
        numbers_per_token: how many numbers the keys and values of one token have.
        state_bytes: bytes of one row's recurrent state.
        window: of how many tokens of a row a pass reads the keys and values at most; None for all.
    """

    module: str = ""
    numbers_per_token: int = 0
    state_bytes: int = 0
    window: int | None = None

    def nbytes(
        self, dtype: torch.dtype, num_tokens: int, num_states: int, *, only_read: bool = False
    ) -> int:
        """Return the bytes for `num_tokens` tokens, of all rows, and `num_states` rows' states.

        Args:
            only_read: count what a pass must read, and not what the runner keeps.
        """
        if only_read and self.window is not None:
            num_tokens = min(num_tokens, num_states * self.window)
        token_bytes = self.numbers_per_token * dtype.itemsize
        return num_tokens * token_bytes + num_states * self.state_bytes


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
    """The sizes of a model or of a draft head, before its weights load.

    Attributes:
        role: `model` for the target, `draft` for a draft: the setting that names it.
        dtype: format of everything that is not quantized.
        blocks: in the order in which they are placed on devices.
        quantization: applied by bitsandbytes while loading.
        stored: quantization of the repository's own weights; None for none.
        num_parameters: parameters of the architecture, quantized or not; shared tensors count once.
        modules: names of all modules, the empty one included.
        spare_slots: for a draft head: slots that its own cache has beyond the needed ones. None for
            a model, whose runner holds the cache.
        copied: for a draft head: matrices of the target that it copies to its own device where they
            are on others.
        borrowed_tensors: for a draft: weights of the target that its passes read too.
        drafts_in_one_pass: for a draft: whether one pass drafts all tokens.
        pass_numbers: about how many numbers a layer works with at once for each token of a pass; 0
            where unknown.
        estimated_cache: whether cache sizes were estimated from the configuration, because the
            model's code does not reveal them.
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
    spare_slots: int | None = None
    copied: tuple[Block, ...] = ()
    borrowed_tensors: tuple[TensorSketch, ...] = ()
    drafts_in_one_pass: bool = False
    pass_numbers: int = 0
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
    def unquantized_bytes(self) -> list[int]:
        """The same where blocks are offloaded: bitsandbytes does not quantize those."""
        return self._block_bytes("none")

    def _block_bytes(self, quantization: Quantization) -> list[int]:
        sizes = []
        for block in self.blocks:
            sizes.append(sum(tensor.nbytes(self.dtype, quantization) for tensor in block.tensors))
        return sizes

    def block_caches(
        self, num_tokens: int = 1, num_states: int = 1, *, only_read: bool = False
    ) -> list[int]:
        """Return the bytes of each block's caches for so many tokens and states, of all rows.

        Args:
            only_read: count what a pass must read, and not what the runner keeps.
        """
        sizes = []
        for block in self.blocks:
            caches = [
                cache.nbytes(self.dtype, num_tokens, num_states, only_read=only_read)
                for cache in block.caches
            ]
            sizes.append(sum(caches))
        return sizes

    @property
    def weight_bytes(self) -> int:
        """Weights and buffers of all blocks."""
        return sum(self.block_bytes)

    @property
    def cache_bytes(self) -> int:
        """Keys and values of all blocks for one token of one row."""
        return sum(self.block_caches(num_states=0))

    @property
    def is_head(self) -> bool:
        """Whether it is a draft head, whose cache is its own."""
        return self.spare_slots is not None

    @property
    def state_bytes(self) -> int:
        """The recurrent state of one row."""
        return sum(self.block_caches(num_tokens=0))

    @property
    def knows_cache(self) -> bool:
        """Whether the size of the cache is known.

        A model always has a cache, so that a size of zero means an unknown one. A head's size is
        always known, and is zero for a head without attention.
        """
        return self.is_head or bool(self.cache_bytes or self.state_bytes)

    @property
    def about_cache(self) -> str | None:
        """A sentence if the size of the cache is unknown or estimated, else None."""
        name = f"{self.role}={self.settings.name}"
        no_size = f"the code of {name} does not tell the size of its KV cache"
        if not self.knows_cache:
            return f"{no_size}, nor does its configuration: it is not counted"
        if self.estimated_cache:
            return f"{no_size}: it is estimated from the configuration"
        return None

    def read_bytes(self, num_tokens: int = 1) -> int:
        """Return the bytes of weights that a pass of `num_tokens` tokens reads, on any device."""
        total = 0
        for tensor in (*self.tensors, *self.borrowed_tensors):
            size = tensor.nbytes(self.dtype, self.quantization)
            total += round(tensor.read_share(num_tokens) * size)
        return total

    def weights_on(self, device_map: DeviceMap, *, num_tokens: int | None = None) -> dict[str, int]:
        """Return the bytes of weights and buffers by `cuda:0`, `cpu` or `disk`.

        Args:
            num_tokens: count only what a forward pass of this many tokens reads; None counts all.
        """
        has_offloaded = offloads(device_map)
        total: Counter[str] = Counter()
        for tensor in self.tensors:
            device = device_map[covering(tensor.name, device_map)]
            is_offloaded = has_offloaded and not isinstance(device, int)
            size = tensor.nbytes(self.dtype, "none" if is_offloaded else self.quantization)
            share = 1.0 if num_tokens is None else tensor.read_share(num_tokens)
            total[device_name(device)] += round(share * size)
        return {name: size for name, size in total.items() if size}

    def caches_on(
        self,
        device_map: DeviceMap,
        num_tokens: int,
        num_states: int,
        *,
        only_read: bool = False,
    ) -> dict[str, int]:
        """Return the bytes of caches by device; those of offloaded layers are on the first GPU.

        Args:
            only_read: count what a pass must read, and not what the runner keeps.
        """
        gpus = [device for device in device_map.values() if isinstance(device, int)]
        fallback_device = gpus[0] if gpus else "cpu"
        total: Counter[str] = Counter()
        for block in self.blocks:
            for cache in block.caches:
                device = device_map[covering(cache.module, device_map)]
                name = device_name(device if isinstance(device, int) else fallback_device)
                total[name] += cache.nbytes(self.dtype, num_tokens, num_states, only_read=only_read)
        return dict(total)


def eight_bit_bytes(count: int, outputs: int) -> int:
    """Return the bytes of `count` weights in LLM.int8(): int8, and a float32 scale per output."""
    return count + 4 * outputs


def four_bit_bytes(count: int, block_size: int = 64, *, nested: bool = True) -> int:
    """Return the bytes of `count` weights in NF4, with a scale for every `block_size` weights.

    Args:
        nested: whether the scales are quantized as well.
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
    """Return the longest of `modules` that holds the tensor or module `name`.

    `model.layers.3.weight` is held by `model.layers.3`, by `model` and by "".

    Raises:
        KeyError: if none holds it.
    """
    key = name
    while key not in modules:
        if not key:
            raise KeyError(name)
        key = key.rpartition(".")[0]
    return key


def device_name(device: Device) -> str:
    """Return `cuda:0` for GPU 0; `cpu` and `disk` as they are."""
    return f"cuda:{device}" if isinstance(device, int) else device


def offloads(device_map: DeviceMap) -> bool:
    """Return whether some layers are stored on another device than the one that computes them."""
    devices = set(device_map.values())
    return "disk" in devices or ("cpu" in devices and len(devices) > 1)
