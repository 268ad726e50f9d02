"""Computes the sizes of a model: the size of each tensor, and of each layer's cache.

A sketch is made before weights load (`sketch_model`). The model is built once on the meta device, where tensors have
no memory. So the sizes are those of the real modules, whatever the architecture is. Running one token through this
model shows the size of each layer's cache.

From these numbers, `fit` computes whether the model fits and where its layers go, and `engine/planning.py` computes how
many bytes a step reads.
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
# The device of each module, by the module's name; the name "" means the whole model.
DeviceMap = Mapping[str, Device]

# The names that configurations use for the number of experts in a layer, and for the number of experts that process a
# token.
_NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_NUM_USED = ("num_experts_per_tok", "top_k_experts", "moe_topk")


@dataclass(frozen=True)
class TensorSketch:
    """The size of a parameter or buffer, and how much of it a pass reads.

    Attributes:
        count: the number of its elements.
        itemsize: the bytes of each element; None if elements have the model's dtype.
        outputs: for a matrix that bitsandbytes would quantize, the number of its outputs; 0 for any other tensor.
        read_per_token: the share of the tensor that a pass over one token reads: 0 for embeddings, of which only one
            row is read, and for buffers without weights; less than 1 for experts; 1 for other tensors. In a server
            (`as_served`), it is 0 for layers that only draft, too.
        name: its name in the model. Empty for a tensor of a head, because heads are never split over devices.
    """

    count: int
    itemsize: int | None = None
    outputs: int = 0
    read_per_token: float = 1.0
    name: str = ""

    def nbytes(self, dtype: torch.dtype, quantization: Quantization) -> int:
        """Return the bytes that the tensor takes in memory. For a quantized matrix, they include the scales."""
        if self.outputs and quantization == "8bit":
            return eight_bit_bytes(self.count, self.outputs)
        if self.outputs and quantization == "4bit":
            return four_bit_bytes(self.count)
        return self.count * (self.itemsize or dtype.itemsize)

    def read_share(self, num_tokens: int) -> float:
        """Return the share of the tensor that a pass over `num_tokens` tokens reads.

        Tokens are assumed to choose their experts independently of each other. If a layer has E experts, and each token
        uses k of them, then n tokens use E (1 − (1 − k/E)^n) different experts on average. In real texts, tokens often
        choose the same experts, so that fewer are read.
        """
        return 1 - (1 - self.read_per_token) ** num_tokens


@dataclass(frozen=True)
class LayerCache:
    """The size of one layer's cache: keys and values for each token of each row, and a recurrent state for each row.

    Attributes:
        numbers_per_token: how many numbers the keys and values of one token have; 0 without keys and values.
        state_bytes: the bytes of one row's recurrent state; 0 without one.
        window: the largest number of tokens of a row whose keys and values a pass reads; None if it reads all.
        module: the name of the module that fills the cache; empty for a head.
    """

    numbers_per_token: int
    state_bytes: int = 0
    window: int | None = None
    module: str = ""

    def nbytes(self, dtype: torch.dtype, num_tokens: int, num_states: int) -> int:
        """Return the bytes of the keys and values for `num_tokens` tokens (of all rows together), plus the bytes of
        the recurrent states for `num_states` rows.
        """
        token_bytes = self.numbers_per_token * dtype.itemsize
        return num_tokens * token_bytes + num_states * self.state_bytes


@dataclass(frozen=True)
class Sketch:
    """The sizes of a model or of a draft head, before its weights load.

    Attributes:
        role: the setting that names the model: `model` for the target, `draft` for a draft.
        settings: the settings of the model or head.
        dtype: the dtype of all tensors that are not quantized.
        tensors: the sizes of all tensors, in the order of the modules. A tensor that several modules share appears
            once.
        caches: the size of each layer's cache, in the order of the layers.
        model: the model on the meta device; None for a head.
        quantization: the quantization that bitsandbytes applies while the weights load.
        stored: the quantization of the stored weights; None if they are not quantized.
        num_parameters: the number of parameters of the architecture, quantized or not. Shared tensors count once.
        vocabulary_size: the number of logits after each prompt, which need memory; 0 if they are not counted, as in a
            server.
        is_head: whether this is a draft head.
        copied_tensors: for a draft head: the matrices of the target that the head copies to its own device if they are
            on another device.
        borrowed_tensors: for a draft: weights of the target that the draft's passes read.
        drafts_in_one_pass: for a draft head: whether one pass drafts all tokens.
        block_size: for a draft head that always drafts a whole block: the number of tokens in the block; otherwise 0.
        pass_numbers: an estimate of how many numbers a layer holds at the same time for each token of a pass; 0 if this
            is unknown.
        is_served: whether the sizes are those of a model in a server (`as_served`).
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
    block_size: int = 0
    pass_numbers: int = 0
    is_served: bool = False

    def tensor_bytes(self, tensor: TensorSketch) -> int:
        """Return the bytes that one of the model's tensors takes in memory."""
        return tensor.nbytes(self.dtype, self.quantization)

    @functools.cached_property
    def weight_bytes(self) -> int:
        """The bytes of weights and buffers."""
        return sum(map(self.tensor_bytes, self.tensors))

    def cache_sizes(self, num_tokens: int, num_states: int) -> list[int]:
        """Return the bytes of each layer's cache, for `num_tokens` tokens and `num_states` recurrent states in all rows
        together.
        """
        return [cache.nbytes(self.dtype, num_tokens, num_states) for cache in self.caches]

    @property
    def state_bytes(self) -> int:
        """The bytes of one row's recurrent state in all layers."""
        return sum(self.cache_sizes(num_tokens=0, num_states=1))

    @property
    def knows_cache(self) -> bool:
        """Whether the size of the cache is known.

        A model always has a cache, so a size of 0 means that the size is unknown. The size of a head's cache is always
        known; it is 0 for a head without attention.
        """
        return self.is_head or any(self.cache_sizes(num_tokens=1, num_states=1))

    @property
    def about_cache(self) -> str | None:
        """A sentence for the user if the size of the cache is unknown; None if it is known."""
        if self.knows_cache:
            return None
        name = f"{self.role}={self.settings.name}"
        return f"the code of {name} does not show the size of its KV cache: it is not counted"

    def read_bytes(self, num_tokens: int = 1) -> int:
        """Return the bytes of weights that a pass over `num_tokens` tokens reads, on all devices together."""
        tensors = (*self.tensors, *self.borrowed_tensors)
        return sum(round(each.read_share(num_tokens) * self.tensor_bytes(each)) for each in tensors)

    def pass_bytes(self, num_rows: int, context: int, num_tokens: int = 1) -> int:
        """Return the bytes of weights and caches that a pass reads.

        Args:
            num_rows: the number of rows.
            context: the number of tokens of each row in the cache.
            num_tokens: the number of tokens of each row in the pass: 1 for a step, K + 1 for a verification.
        """
        return self.read_bytes(num_rows * num_tokens) + num_rows * self.row_bytes(context)

    def row_sizes(self, context: int) -> list[int]:
        """Return the bytes of one row's cache in each layer. A layer with a sliding window counts only the tokens in
        its window.
        """
        return [
            cache.nbytes(self.dtype, min(context, cache.window or context), 1)
            for cache in self.caches
        ]

    def row_bytes(self, context: int) -> int:
        """Return the bytes of one row's caches in all layers."""
        return sum(self.row_sizes(context))


def eight_bit_bytes(count: int, outputs: int) -> int:
    """Return the bytes of `count` weights in LLM.int8(): one byte for each weight, and a float32 scale per output."""
    return count + 4 * outputs


def four_bit_bytes(count: int, block_size: int = 64, *, nested: bool = True) -> int:
    """Return the bytes of `count` weights in NF4, with a scale for every `block_size` weights.

    Args:
        nested: whether the scales are quantized too.
    """
    num_scales = math.ceil(count / block_size)
    scales = 4 * num_scales
    if nested:
        # The scales are quantized to 8 bits. Every 256 scales share a float32 scale, and all scales share an offset and
        # a table of 256 values.
        scales = num_scales + 4 * math.ceil(num_scales / 256) + 4 + 256 * 4
    # Each byte holds two weights. A table contains the 16 values that weights can have, in float32.
    return math.ceil(count / 2) + 16 * 4 + scales


def owning_module(name: str, modules: Container[str]) -> str:
    """Return the innermost of `modules` that contains the tensor or module `name`.

    For example, `model.layers.3.weight` is in `model.layers.3`, in `model` and in "". If all three are among `modules`,
    the result is `model.layers.3`.

    Raises:
        KeyError: none of `modules` contains it.
    """
    key = name
    while key not in modules:
        if not key:
            raise KeyError(name)
        key = key.rpartition(".")[0]
    return key


def device_name(device: Device) -> str:
    """Return torch's name for a device: `cuda:0` for 0, and `cpu` for `cpu`."""
    return f"cuda:{device}" if isinstance(device, int) else device


# Models on the meta device --------------------------------------------------------------------------


def bare_model(checkpoint: Checkpoint, dtype: torch.dtype) -> PreTrainedModel:
    """Build a checkpoint's model on the meta device, without quantization.

    Raises:
        SettingError, RunError: the model cannot be built from its configuration.
    """
    factory: Any = AutoModelForCausalLM
    # The configuration is copied, because a model writes into it, and loading needs it unchanged.
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
    """Build a checkpoint's model on the meta device, and return its sizes. Raises as `bare_model` does."""
    model = bare_model(checkpoint, dtype)
    settings = checkpoint.settings
    stored = stored_quantization(checkpoint.config)
    # These are computed before quantized modules replace the original ones, because quantized weights are packed.
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    pass_numbers = _pass_numbers(model)
    caches = measured_caches(model)
    quantizable: set[str] = set()
    if stored is not None:
        # The stored weights are quantized. This replaces modules by quantized ones, as loading does.
        quantizer: Any = AutoHfQuantizer.from_config(
            model.config.quantization_config, pre_quantized=True
        )
        with init_empty_weights(include_buffers=True):
            quantizer.preprocess_model(model=model, dtype=dtype, device_map=None)
    elif settings.gguf_file is None:
        quantizable = _quantizable_modules(model)
    # The keys are the tensors' ids, because modules may share tensors, and a shared tensor counts once.
    tensors: dict[int, TensorSketch] = {}
    # For each layer's number, the name of the module that fills the layer's cache: the first module with this number.
    cache_modules: dict[object, str] = {}
    for module_name, module in model.named_modules(remove_duplicate=False):
        layer = getattr(module, "layer_idx", getattr(module, "layer_id", None))
        cache_modules.setdefault(layer, module_name)
        for name, tensor in own_tensors(module, module_name):
            sketch = sketch_tensor(
                model, module, name, tensor, quantizable=module_name in quantizable
            )
            tensors.setdefault(id(tensor), sketch)
    # A layer whose module does not state its number counts as being in the first module.
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
    """Return the sizes that a model has in a server.

    A server holds each request's cache once, in 16 bits. In a layer with a sliding window, it holds only the tokens in
    the window. It reads prompts in pieces, so that they need little memory. The tensors of a GGUF file have the sizes
    in which they are stored.

    Raises:
        OSError: a part of a divided GGUF file is missing.
    """
    served = replace(sketch, dtype=torch.float16, pass_numbers=0, vocabulary_size=0, is_served=True)
    if sketch.settings.gguf_file is None:
        return served
    stored = [*_gguf_tensors(sketch.settings, sketch.settings.gguf_file)]
    names = {tensor.name for tensor in stored}
    # Layers for multi-token prediction are only used for drafting. A regular step does not read them.
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
        tensors.append(TensorSketch(num_bytes, itemsize=1, read_per_token=share, name=tensor.name))
        bytes_by_type[tensor.tensor_type.name] += num_bytes
    caches = [replace(cache, module=f"blk.{layer}") for layer, cache in enumerate(sketch.caches)]
    return replace(
        served,
        tensors=tuple(tensors),
        caches=tuple(cache for cache in caches if cache.module not in mtp_layers),
        stored=max(bytes_by_type, key=bytes_by_type.__getitem__),
    )


def gguf_layer(name: str) -> str:
    """Return the name of the layer that a tensor of a GGUF file belongs to: `blk.3` for `blk.3.attn_q.weight`. For a
    tensor outside the layers, return the first part of its name.
    """
    kind, number, *_ = name.split(".")
    return f"{kind}.{number}" if kind == "blk" else kind


def _gguf_tensors(settings: ModelSettings, file: str) -> Iterator[Any]:
    """Yield the tensors of a GGUF file. If the file is divided into parts (`X-00001-of-00003.gguf`), yield the tensors
    of all parts.
    """
    # Imported here, because the package is an optional dependency.
    from gguf import GGUFReader

    part = re.compile(r"\d{5}(?=-of-(\d{5})\.gguf$)")
    divided = part.search(file)
    num_parts = int(divided[1]) if divided else 1
    for number in range(1, num_parts + 1):
        name = part.sub(f"{number:05}", file)
        path: Any = cached_file(settings.repository, name, revision=settings.revision)
        yield from GGUFReader(path).tensors


def _pass_numbers(model: PreTrainedModel) -> int:
    """Estimate how many numbers a layer holds at the same time for each token of a pass.

    The estimate counts the inputs of the layer's widest matrix, the tensors from which these inputs are computed, and
    some copies of the hidden state. Compared with measurements, it is 6 % too low for GPT-2, 20 % too high for Llama,
    and up to 90 % too high for mixtures of experts.
    """
    config = model.config.get_text_config(decoder=True)
    hidden_size = getattr(config, "hidden_size", None) or 0
    # Linear stores [outputs, inputs] and Conv1D [inputs, outputs]. The widest inputs are also the
    # outputs of another matrix, so the last dimension serves for both.
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
    bitsandbytes, so that `fit` does not suggest quantization.
    """
    if importlib.util.find_spec("bitsandbytes") is None:
        return set()
    kept = HfQuantizer.get_modules_to_not_convert(
        model, None, list(model._keep_in_fp32_modules or ())
    )
    return {
        name
        for name, module in model.named_modules()
        if (type(module) is nn.Linear or isinstance(module, Conv1D))
        and should_convert_module(name, kept)
    }


# Caches -------------------------------------------------------------------------------------------


def measured_caches(model: PreTrainedModel) -> Sequence[LayerCache]:
    """Run one token through a model on the meta device, and measure the returned cache of each layer.

    So the sizes are right for all kinds of attention, for example with grouped heads or latent attention. Some settings
    of the model are changed for this, and stay changed: a model on the meta device never decodes.

    Returns:
        The caches of all layers; empty if the model does not run on the meta device because its code reads values of
        tensors.
    """
    try:
        with torch.inference_mode():
            # The settings below stop models from reading values of tensors, because tensors on the meta device have no
            # values.
            # If there is a padding token, some models search the tokens for padding.
            model.config.pad_token_id = None
            # Other implementations of attention may search the mask for padding.
            model.set_attn_implementation("eager")
            # Other implementations of experts count the tokens of each expert.
            model.set_experts_implementation("batched_mm")
            token = torch.zeros(1, 1, dtype=torch.long, device="meta")
            # Without a mask, Gemma 4 searches the positions to find several texts in one row.
            output: Any = model(input_ids=token, attention_mask=token, use_cache=True)
        layers = cache_of(output).layers
    except Exception:
        layers = []
    caches = []
    for layer in layers:
        numbers_per_token = 0
        state_bytes = 0
        for name, value in vars(layer).items():
            # A layer with several states stores them in a dictionary.
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
    """Yield the parameters and buffers of a module, without those of its submodules: the full name of each, and its
    tensor.
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
        # Some libraries keep quantized weights in buffers of these types. Other buffers are not read, or small.
        is_weight = tensor.dtype in (torch.int32, torch.int8, torch.uint8)
        read_share = _read_share(model, module, name, tensor) if is_weight else 0.0
        return TensorSketch(tensor.numel(), tensor.itemsize, read_per_token=read_share, name=name)
    is_weight = name.rpartition(".")[2] == "weight"
    count = tensor.numel()
    itemsize = None
    # The class is compared by its name, so that bitsandbytes need not be imported.
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
        # The weight of a Conv1D is [inputs, outputs]; the weights of other modules are [outputs, inputs].
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
    """Return the share of a parameter that a pass over one token reads."""
    if isinstance(module, nn.Embedding):
        # A lookup reads a single row. But if the embedding is the output matrix too, all of it is read.
        output = getattr(model.get_output_embeddings(), "weight", None)
        return 1.0 if parameter is output else 0.0
    # JetMoE has all experts of a layer in one tensor, in a module whose name does not contain `experts`.
    num_experts = _first_number(model.config.get_text_config(decoder=True), _NUM_EXPERTS)
    is_stack = parameter.dim() == 3 and len(parameter) == num_experts
    return _expert_share(model) if ".experts." in name or is_stack else 1.0


def _expert_share(model: PreTrainedModel) -> float:
    """Return the share of a layer's experts that a token uses; 1 if the configuration does not state these numbers."""
    config = model.config.get_text_config(decoder=True)
    num_experts = _first_number(config, _NUM_EXPERTS)
    num_used = _first_number(config, _NUM_USED)
    return num_used / num_experts if num_experts and num_used else 1.0


def _first_number(config: PreTrainedConfig, names: Sequence[str]) -> int | None:
    """Return the value of the first of these fields of a configuration that is an integer; None if none is."""
    numbers = (getattr(config, name, None) for name in names)
    return next((number for number in numbers if isinstance(number, int)), None)
