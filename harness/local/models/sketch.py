"""The sizes of a model: of each tensor, and of each layer's cache.

A sketch is made before any weights load (`sketch_model`). The model is built once on the meta
device, where tensors have no memory. So the sizes are those of the real modules, whatever the
architecture, and running one token through the model shows the cache of each layer.

Whether the model fits, where its layers go (`fit`) and how much a step reads (`engine/planning.py`)
are then computed from these numbers.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import math
import re
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.auto import AutoHfQuantizer
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils import cached_file

from harness.config.failures import explain_configuration
from harness.config.settings import ModelSettings, Quantization
from harness.local.models.cache_names import cache_of
from harness.local.models.checkpoints import Checkpoint, stored_quantization
from harness.local.models.tokenizers import vocabulary_size

# A GPU's index, or "cpu".
Device = int | str
# The device of each module, by name; the name "" means the whole model.
DeviceMap = Mapping[str, Device]

# The names in configurations for the number of experts in a layer, and for the number of experts that a token uses.
_NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_NUM_USED = ("num_experts_per_tok", "top_k_experts", "moe_topk")


@dataclass(frozen=True)
class TensorSketch:
    """The sizes of a parameter or buffer.

    Attributes:
        count: how many numbers it has.
        itemsize: the bytes of each number; None for those of the model's dtype.
        outputs: the number of outputs of a matrix that bitsandbytes would quantize; 0 for any other tensor.
        read_per_token: the share that a forward pass of one token reads: 0 for embeddings that are
            looked up, less than 1 for experts.
        name: its name in the model; empty in a head, which is never split over devices.
    """

    count: int
    itemsize: int | None = None
    outputs: int = 0
    read_per_token: float = 1.0
    name: str = ""

    def nbytes(self, dtype: torch.dtype, quantization: Quantization) -> int:
        """Return its bytes in memory, including the scales of a quantized matrix."""
        if self.outputs and quantization == "8bit":
            return eight_bit_bytes(self.count, self.outputs)
        if self.outputs and quantization == "4bit":
            return four_bit_bytes(self.count)
        return self.count * (self.itemsize or dtype.itemsize)

    def read_share(self, num_tokens: int) -> float:
        """Return the share of the tensor that a pass over `num_tokens` tokens reads.

        Each token is assumed to choose its experts independently. With E experts, k of them for each token, n tokens
        then read E (1 − (1 − k/E)^n) experts on average. Texts whose tokens agree on experts read fewer.
        """
        return 1 - (1 - self.read_per_token) ** num_tokens


@dataclass(frozen=True)
class LayerCache:
    """The size of one layer's cache: keys and values for each token of each row, and a recurrent state for each row.

    Attributes:
        numbers_per_token: how many numbers the keys and values of one token have.
        state_bytes: the bytes of one row's recurrent state.
        window: the most tokens of a row whose keys and values a pass reads; None for all.
        module: the name of the module that fills it; empty in a head.
    """

    numbers_per_token: int
    state_bytes: int = 0
    window: int | None = None
    module: str = ""

    def nbytes(self, dtype: torch.dtype, num_tokens: int, num_states: int) -> int:
        """Return the bytes of keys and values for `num_tokens` tokens, those of all rows together, and of recurrent
        states for `num_states` rows.
        """
        token_bytes = self.numbers_per_token * dtype.itemsize
        return num_tokens * token_bytes + num_states * self.state_bytes


@dataclass(frozen=True)
class Sketch:
    """The sizes of a model or of a draft head, before its weights load.

    Attributes:
        role: `model` for the target, `draft` for a draft: the setting that names it.
        dtype: format of everything that is not quantized.
        tensors: in the order of the modules; one that several modules share is here once.
        caches: of each layer.
        model: on the meta device; None for a head.
        quantization: applied by bitsandbytes while loading.
        stored: quantization of the repository's own weights; None for none.
        num_parameters: parameters of the architecture, quantized or not; shared tensors count once.
        is_head: whether it is a draft head, which has a cache of its own.
        copied_tensors: for a draft head: matrices of the target that it copies to its own device where
            they are on others.
        borrowed_tensors: for a draft: weights of the target that its passes read too.
        drafts_in_one_pass: for a draft head: whether one pass drafts all tokens.
        pass_numbers: about how many numbers a layer works with at once for each token of a pass; 0
            where unknown.
        is_served: whether the sizes are those in a server (`as_served`).
    """

    role: str
    settings: ModelSettings
    dtype: torch.dtype
    tensors: tuple[TensorSketch, ...]
    caches: tuple[LayerCache, ...] = ()
    model: PreTrainedModel | None = field(default=None, compare=False)
    quantization: Quantization = "none"
    stored: str | None = None
    num_parameters: int = 0
    vocabulary_size: int = 0
    is_head: bool = False
    copied_tensors: tuple[TensorSketch, ...] = ()
    borrowed_tensors: tuple[TensorSketch, ...] = ()
    drafts_in_one_pass: bool = False
    pass_numbers: int = 0
    is_served: bool = False

    def tensor_bytes(self, tensor: TensorSketch) -> int:
        """Return the bytes of one of its tensors in memory."""
        return tensor.nbytes(self.dtype, self.quantization)

    @functools.cached_property
    def weight_bytes(self) -> int:
        """The bytes of weights and buffers."""
        return sum(map(self.tensor_bytes, self.tensors))

    def cache_sizes(self, num_tokens: int, num_states: int) -> list[int]:
        """Return the bytes of each layer's cache, for this number of tokens and of recurrent states in all rows
        together.
        """
        return [cache.nbytes(self.dtype, num_tokens, num_states) for cache in self.caches]

    @property
    def cache_bytes(self) -> int:
        """The bytes of the keys and values of all layers for one token of one row."""
        return sum(self.cache_sizes(num_tokens=1, num_states=0))

    @property
    def state_bytes(self) -> int:
        """The bytes of one row's recurrent state in all layers."""
        return sum(self.cache_sizes(num_tokens=0, num_states=1))

    @property
    def knows_cache(self) -> bool:
        """Whether the size of the cache is known.

        A model always has a cache, so that a size of 0 means an unknown size. A head's size is
        always known, and is 0 for a head without attention.
        """
        return self.is_head or bool(self.cache_bytes or self.state_bytes)

    @property
    def about_cache(self) -> str | None:
        """A sentence if the size of the cache is unknown, else None."""
        if self.knows_cache:
            return None
        name = f"{self.role}={self.settings.name}"
        return f"the code of {name} does not show the size of its KV cache: it is not counted"

    def read_bytes(self, num_tokens: int = 1) -> int:
        """Return the bytes of weights that a pass over `num_tokens` tokens reads, on all devices together."""
        total = 0
        for tensor in (*self.tensors, *self.borrowed_tensors):
            total += round(tensor.read_share(num_tokens) * self.tensor_bytes(tensor))
        return total

    def pass_bytes(self, num_rows: int, context: int, num_tokens: int = 1) -> int:
        """Return the bytes of weights and caches that a pass reads.

        Args:
            num_rows: the number of rows.
            context: the number of tokens of each row in the cache.
            num_tokens: the number of tokens of each row in the pass: 1 for a step, K + 1 for a verification.
        """
        return self.read_bytes(num_rows * num_tokens) + num_rows * self.row_bytes(context)

    def row_sizes(self, context: int) -> list[int]:
        """Return the bytes of one row's cache in each layer, within the layer's window."""
        sizes = []
        for cache in self.caches:
            num_seen = context if cache.window is None else min(context, cache.window)
            sizes.append(cache.nbytes(self.dtype, num_seen, 1))
        return sizes

    def row_bytes(self, context: int) -> int:
        """Return the bytes of one row's caches in all layers."""
        return sum(self.row_sizes(context))


def eight_bit_bytes(count: int, outputs: int) -> int:
    """Return the bytes of `count` weights in LLM.int8(): one byte for each, and a float32 scale for each output."""
    return count + 4 * outputs


def four_bit_bytes(count: int, block_size: int = 64, *, nested: bool = True) -> int:
    """Return the bytes of `count` weights in NF4, with a scale for every `block_size` weights.

    Args:
        nested: whether the scales are quantized too.
    """
    num_scales = math.ceil(count / block_size)
    scales = 4 * num_scales
    if nested:
        # Scales in 8 bits. Every 256 of them share a float32 scale, and all share an offset and a table of
        # 256 values.
        scales = num_scales + 4 * math.ceil(num_scales / 256) + 4 + 256 * 4
    # Two weights in each byte, and a table of the 16 values that they stand for, in float32.
    return math.ceil(count / 2) + 16 * 4 + scales


def owning_module(name: str, modules: Container[str]) -> str:
    """Return the longest of `modules` that holds the tensor or module `name`.

    `model.layers.3.weight` is held by `model.layers.3`, by `model` and by "".

    Raises:
        KeyError: none of them holds it.
    """
    key = name
    while key not in modules:
        if not key:
            raise KeyError(name)
        key = key.rpartition(".")[0]
    return key


def device_name(device: Device) -> str:
    """Return torch's name of a device: `cuda:0` for 0, and `cpu` for `cpu`."""
    return f"cuda:{device}" if isinstance(device, int) else device


# Models on the meta device --------------------------------------------------------------------------


def bare_model(checkpoint: Checkpoint, dtype: torch.dtype) -> PreTrainedModel:
    """Build a checkpoint's model on the meta device, with nothing quantized."""
    factory: Any = AutoModelForCausalLM
    # A copy, because the model writes into its configuration, and the checkpoint's is needed unchanged for loading.
    config = copy.deepcopy(checkpoint.config)
    trust = checkpoint.settings.trust_remote_code
    try:
        with init_empty_weights(include_buffers=True):
            model: PreTrainedModel = factory.from_config(
                config, dtype=dtype, trust_remote_code=trust
            )
    except Exception as error:
        raise explain_configuration(error, checkpoint.role, checkpoint.settings) from error
    model.tie_weights()
    return model


def sketch_model(checkpoint: Checkpoint, dtype: torch.dtype) -> Sketch:
    """Build a checkpoint's model on the meta device, and return its sizes."""
    model = bare_model(checkpoint, dtype)
    settings = checkpoint.settings
    stored = stored_quantization(checkpoint.config)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    pass_numbers = _pass_numbers(model)
    caches = measured_caches(model)
    quantizable: set[str] = set()
    if stored is not None:
        # Replaces modules as loading does for weights that are stored quantized.
        quantizer: Any = AutoHfQuantizer.from_config(
            model.config.quantization_config, pre_quantized=True
        )
        with init_empty_weights(include_buffers=True):
            quantizer.preprocess_model(model=model, dtype=dtype, device_map=None)
    elif settings.gguf_file is None:
        quantizable = _quantizable_modules(model)
    # By `id`, because modules may share tensors.
    tensors: dict[int, TensorSketch] = {}
    # The module that fills each layer's cache is the first one with the layer's number.
    cache_modules: dict[object, str] = {}
    for module_name, module in model.named_modules(remove_duplicate=False):
        layer = getattr(module, "layer_idx", getattr(module, "layer_id", None))
        cache_modules.setdefault(layer, module_name)
        for name, tensor in own_tensors(module, module_name):
            sketch = sketch_tensor(model, module, name, tensor, module_name in quantizable)
            tensors.setdefault(id(tensor), sketch)
    first_module = next(iter(tensors.values())).name.rpartition(".")[0]
    return Sketch(
        role=checkpoint.role,
        settings=settings,
        dtype=dtype,
        tensors=tuple(tensors.values()),
        caches=tuple(
            replace(cache, module=cache_modules.get(layer, first_module))
            for layer, cache in enumerate(caches)
        ),
        model=model,
        quantization="none" if stored is not None else settings.quantization,
        stored=stored,
        num_parameters=num_parameters,
        vocabulary_size=vocabulary_size(checkpoint.config),
        pass_numbers=pass_numbers,
    )


def as_served(sketch: Sketch) -> Sketch:
    """Return the sizes of a model in a server. A server holds each request's cache once, in 16 bits and within the
    windows of the layers, and reads prompts in pieces. The tensors of a GGUF file have the sizes in which they are
    stored.

    Raises:
        OSError: a part of a divided file is missing.
    """
    served = replace(sketch, dtype=torch.float16, pass_numbers=0, vocabulary_size=0, is_served=True)
    if sketch.settings.gguf_file is None:
        return served
    stored = [*_gguf_tensors(sketch.settings, sketch.settings.gguf_file)]
    names = {tensor.name for tensor in stored}
    # Layers of multi-token prediction are for drafting. A step of the target does not read them.
    mtp_layers = {gguf_layer(name) for name in names if ".nextn." in name}
    looked_up = ["per_layer_token_embd", "position_embd"]
    if "output.weight" in names:
        looked_up.append("token_embd")
    bytes_by_type: Counter[str] = Counter()
    tensors = []
    for tensor in stored:
        share = 1.0
        if gguf_layer(tensor.name) in mtp_layers or tensor.name.startswith(tuple(looked_up)):
            share = 0.0
        elif "_exps." in tensor.name:
            assert sketch.model is not None
            share = _expert_share(sketch.model)
        num_bytes = int(tensor.n_bytes)
        tensors.append(TensorSketch(num_bytes, 1, read_per_token=share, name=tensor.name))
        bytes_by_type[tensor.tensor_type.name] += num_bytes
    caches = [replace(cache, module=f"blk.{layer}") for layer, cache in enumerate(sketch.caches)]
    return replace(
        served,
        tensors=tuple(tensors),
        caches=tuple(cache for cache in caches if cache.module not in mtp_layers),
        stored=max(bytes_by_type, key=bytes_by_type.__getitem__),
    )


def gguf_layer(name: str) -> str:
    """Return the layer of a tensor in a GGUF file: `blk.3` for `blk.3.attn_q.weight`. For a tensor outside the layers,
    the first part of its name.
    """
    kind, number, *_ = name.split(".")
    return f"{kind}.{number}" if kind == "blk" else kind


def _gguf_tensors(settings: ModelSettings, file: str) -> Iterator[Any]:
    """Yield the tensors of a GGUF file, or of all parts of a divided one (`X-00001-of-00003.gguf`)."""
    from gguf import GGUFReader  # of an extra

    part = re.compile(r"\d{5}(?=-of-(\d{5})\.gguf$)")
    divided = part.search(file)
    num_parts = int(divided[1]) if divided else 1
    for number in range(1, num_parts + 1):
        name = part.sub(f"{number:05}", file)
        path: Any = cached_file(settings.repository, name, revision=settings.revision)
        yield from GGUFReader(path).tensors


def _pass_numbers(model: PreTrainedModel) -> int:
    """Estimate how many numbers a layer holds at once for each token of a pass.

    These are the inputs of its widest matrix, the tensors that these inputs are computed from, and some copies of the
    state. Compared with measurements the estimate is 6 % too low for GPT-2, 20 % too high for Llama, and up to 90 % too
    high for mixtures of experts.
    """
    config = model.config.get_text_config(decoder=True)
    hidden_size = getattr(config, "hidden_size", None) or 0
    # Linear stores [outputs, inputs] and Conv1D [inputs, outputs]. The widest inputs are outputs of another matrix.
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    widest = max((matrix.shape[-1] for matrix in matrices), default=0)
    num_used = _first_number(config, _NUM_USED)
    if num_used is not None:
        inner = _first_number(config, ("moe_intermediate_size", "intermediate_size")) or 0
        widest = max(widest, num_used * max(inner, hidden_size))
    return 4 * (widest + hidden_size)


# Quantization -------------------------------------------------------------------------------------


def _quantizable_modules(model: PreTrainedModel) -> set[str]:
    """Return the names of the modules that transformers would quantize with bitsandbytes; empty without
    bitsandbytes.
    """
    if importlib.util.find_spec("bitsandbytes") is None:
        return set()
    kept = HfQuantizer.get_modules_to_not_convert(
        model, None, list(model._keep_in_fp32_modules or ())
    )
    names = set()
    for name, module in model.named_modules():
        is_linear = type(module) is nn.Linear or isinstance(module, Conv1D)
        if is_linear and should_convert_module(name, kept):
            names.add(name)
    return names


# Caches -------------------------------------------------------------------------------------------


def measured_caches(model: PreTrainedModel) -> Sequence[LayerCache]:
    """Run one token through a model on the meta device, and measure the cache of each layer that it returns.

    So grouped heads, latent attention and other kinds have their real sizes.

    Returns:
        The caches of all layers; empty if the model does not run on the meta device, because its code reads values.
    """
    try:
        with torch.inference_mode():
            # These settings keep models from reading values, which tensors on the meta device do not have.
            # With a padding token some models search the tokens for padding.
            model.config.pad_token_id = None
            # Other implementations of attention may search the mask for padding.
            model.set_attn_implementation("eager")
            # Other implementations of experts count the tokens of each expert.
            model.set_experts_implementation("batched_mm")
            token = torch.zeros(1, 1, dtype=torch.long, device="meta")
            # Without a mask Gemma 4 searches the positions for several texts.
            output: Any = model(input_ids=token, attention_mask=token, use_cache=True)
        layers = cache_of(output).layers
    except Exception:
        layers = []
    caches = []
    for layer in layers:
        numbers_per_token = 0
        state_bytes = 0
        for name, value in vars(layer).items():
            # A layer with several states holds them in a dictionary.
            for tensor in value.values() if isinstance(value, dict) else [value]:
                if isinstance(tensor, torch.Tensor) and name in ("keys", "values"):
                    numbers_per_token += tensor.numel()
                elif isinstance(tensor, torch.Tensor) and name.endswith("_states"):
                    state_bytes += tensor.nbytes
        window = getattr(layer, "sliding_window", None)
        caches.append(LayerCache(numbers_per_token, state_bytes, window))
    return caches


# Tensors ------------------------------------------------------------------------------------------


def own_tensors(module: nn.Module, module_name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the full names and the tensors of a module's own parameters and buffers, without those of its
    submodules.
    """
    yield from module.named_parameters(module_name, recurse=False)
    yield from module.named_buffers(module_name, recurse=False)


def sketch_tensor(
    model: PreTrainedModel, module: nn.Module, name: str, tensor: torch.Tensor, quantizable: bool
) -> TensorSketch:
    """Return the sizes of a parameter or buffer.

    Args:
        module: the module that owns the tensor.
        name: the full name of the tensor.
        quantizable: whether bitsandbytes would quantize the module's weight.
    """
    if not isinstance(tensor, nn.Parameter):
        return TensorSketch(tensor.numel(), tensor.itemsize, read_per_token=0.0, name=name)
    is_weight = name.rpartition(".")[2] == "weight"
    count = tensor.numel()
    itemsize = None
    # Compared by name, so that bitsandbytes need not be imported.
    kind = type(module).__name__ if is_weight else ""
    if kind == "Linear8bitLt":
        count, itemsize = eight_bit_bytes(count, len(tensor)), 1
    elif kind == "Linear4bit":
        weight: Any = tensor
        is_nested = bool(weight.compress_statistics)
        count, itemsize = four_bit_bytes(count, int(weight.blocksize), nested=is_nested), 1
    elif not tensor.is_floating_point() or tensor.itemsize < 2:
        # The tensor is quantized by another library.
        itemsize = tensor.itemsize
    outputs = 0
    if is_weight and quantizable:
        # The weight of Conv1D is [inputs, outputs], and that of others [outputs, inputs].
        outputs = tensor.shape[1] if isinstance(module, Conv1D) else tensor.shape[0]
    return TensorSketch(
        count,
        itemsize,
        outputs=outputs,
        read_per_token=_read_share(model, module, name, tensor),
        name=name,
    )


def _read_share(
    model: PreTrainedModel, module: nn.Module, name: str, parameter: torch.Tensor
) -> float:
    """Return the share of a parameter that a forward pass of one token reads."""
    if isinstance(module, nn.Embedding):
        # A lookup reads one row. If the matrix is the output matrix too, all of it is read.
        output = getattr(model.get_output_embeddings(), "weight", None)
        return 1.0 if parameter is output else 0.0
    # JetMoE has all experts of a layer in one tensor, in a module of another name.
    num_experts = _first_number(model.config.get_text_config(decoder=True), _NUM_EXPERTS)
    is_stack = parameter.dim() == 3 and len(parameter) == num_experts
    return _expert_share(model) if ".experts." in name or is_stack else 1.0


def _expert_share(model: PreTrainedModel) -> float:
    """The share of a layer's experts that a token takes; 1 where the configuration has no such numbers."""
    config = model.config.get_text_config(decoder=True)
    num_experts = _first_number(config, _NUM_EXPERTS)
    num_used = _first_number(config, _NUM_USED)
    return num_used / num_experts if num_experts and num_used else 1.0


def _first_number(config: PreTrainedConfig, names: Sequence[str]) -> int | None:
    """Return the value of the first of these fields that is a number in a configuration; None if none is."""
    numbers = (getattr(config, name, None) for name in names)
    return next((number for number in numbers if isinstance(number, int)), None)
