"""Makes sketches of models: each is built once on the meta device, where tensors have no memory.

So the sizes are those of the real modules, whatever the architecture, and one token that passes
through shows the cache of each layer. The model is divided into the blocks that a device map may put
on different devices.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.auto import AutoHfQuantizer
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from harness.config.failures import explain_configuration
from harness.local.models.cache_names import cache_of
from harness.local.models.checkpoints import Checkpoint, recurrent_kind, stored_quantization
from harness.local.models.sketch import (
    Block,
    LayerCache,
    Sketch,
    TensorSketch,
    covering,
    eight_bit_bytes,
    four_bit_bytes,
)
from harness.local.models.tokenizers import vocabulary_size

# Names that configurations have for the number of experts in a layer, and of those that a token takes.
_NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_NUM_USED = ("num_experts_per_tok", "top_k_experts", "moe_topk")

# Sketches by the `id` of their tensor, because modules may share tensors.
_Tensors = dict[int, TensorSketch]

# By class, dtype and configuration: a pass takes much longer than building a model, and sweeps plan
# the same models again and again.
_known_caches: dict[tuple[object, ...], list[LayerCache]] = {}


def bare_model(checkpoint: Checkpoint, dtype: torch.dtype) -> PreTrainedModel:
    """Build the configured model on the meta device, with nothing quantized."""
    factory: Any = AutoModelForCausalLM
    # A copy: the model writes into its configuration, and the checkpoint's is the one to load.
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
    """Build the model on the meta device and record its sizes."""
    model = bare_model(checkpoint, dtype)
    settings = checkpoint.settings
    stored = stored_quantization(checkpoint.config)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    pass_numbers = _pass_numbers(model)
    measured = measured_caches(model)
    caches = measured or configured_caches(checkpoint.config)
    quantizable: set[str] = set()
    if stored is not None:
        # As loading does for weights that are stored quantized.
        quantizer: Any = AutoHfQuantizer.from_config(
            model.config.quantization_config, pre_quantized=True
        )
        with init_empty_weights(include_buffers=True):
            quantizer.preprocess_model(model=model, dtype=dtype, device_map=None)
    elif settings.gguf_file is None:
        quantizable = _quantizable_modules(model)
    return Sketch(
        role=checkpoint.role,
        settings=settings,
        dtype=dtype,
        blocks=_blocks(model, quantizable, caches),
        quantization="none" if stored is not None else settings.quantization,
        stored=stored,
        num_parameters=num_parameters,
        vocabulary_size=vocabulary_size(checkpoint.config),
        class_name=type(model).__name__,
        modules=frozenset(name for name, _ in model.named_modules()),
        pass_numbers=pass_numbers,
        estimated_cache=not measured,
    )


def _pass_numbers(model: PreTrainedModel) -> int:
    """Estimate how many numbers a layer works with at once for each token of a pass.

    These are the inputs of its widest matrix, what they are made of, and some copies of the state:
    6 % too few for GPT-2, 20 % too many for Llama, up to 90 % too many for mixtures.
    """
    config = model.config.get_text_config(decoder=True)
    hidden_size = getattr(config, "hidden_size", None) or 0
    output_matrix = model.get_output_embeddings()
    widest = 0
    for module in model.modules():
        if isinstance(module, nn.Linear) and module is not output_matrix:
            widest = max(widest, module.in_features)
        elif isinstance(module, Conv1D):
            widest = max(widest, module.weight.shape[0])
    num_used = _first_number(config, _NUM_USED)
    if num_used is not None:
        inner = _first_number(config, ("moe_intermediate_size", "intermediate_size")) or 0
        widest = max(widest, num_used * max(inner, hidden_size))
    return 4 * (widest + hidden_size)


# Quantization -------------------------------------------------------------------------------------


def _quantizable_modules(model: PreTrainedModel) -> set[str]:
    """Names of modules that transformers would replace to quantize them with bitsandbytes."""
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
    """Pass one token through a model without memory, and look at the cache of each layer that it returns.

    So grouped heads, latent attention and other kinds count as they are. The runner keeps every
    slot, whatever the window. Equal models are measured once.

    Returns:
        The caches of all layers after one token; empty if the model does not run on the meta device, because its code
        looks at numbers.
    """
    described = model.config.to_dict()
    # A copy in another directory is equal.
    described.pop("_name_or_path", None)
    identity = type(model), model.dtype, repr(described)
    if identity in _known_caches:
        return _known_caches[identity]
    try:
        with torch.inference_mode():
            # Some models look for padding in the tokens.
            model.config.pad_token_id = None
            # Other attention may look for it in the mask.
            model.set_attn_implementation("eager")
            # Other implementations of experts count the tokens of each.
            model.set_experts_implementation("batched_mm")
            token = torch.zeros(1, 1, dtype=torch.long, device="meta")
            output: Any = model(input_ids=token, use_cache=True)
        layers = cache_of(output).layers
    except Exception:
        layers = []
    caches = []
    for layer in layers:
        numbers_per_token = 0
        state_bytes = 0
        for name, value in vars(layer).items():
            # A layer with several states has a dictionary of them.
            for tensor in value.values() if isinstance(value, dict) else [value]:
                if isinstance(tensor, torch.Tensor) and name in ("keys", "values"):
                    numbers_per_token += tensor.numel()
                elif isinstance(tensor, torch.Tensor) and name.endswith("_states"):
                    state_bytes += tensor.nbytes
        window = getattr(layer, "sliding_window", None)
        caches.append(LayerCache("", numbers_per_token, state_bytes, window))
    _known_caches[identity] = caches
    return caches


def configured_caches(config: PreTrainedConfig) -> list[LayerCache]:
    """Estimate caches from the numbers of layers and heads; empty where these say too little."""
    text_config = config.get_text_config(decoder=True)
    num_layers = getattr(text_config, "num_hidden_layers", None)
    num_heads = getattr(text_config, "num_attention_heads", None)
    width = getattr(text_config, "hidden_size", None)
    if not (num_layers and num_heads and width) or recurrent_kind(config) is not None:
        return []
    num_key_heads = getattr(text_config, "num_key_value_heads", None) or num_heads
    head_size = getattr(text_config, "head_dim", None) or width // num_heads
    return [LayerCache(numbers_per_token=2 * num_key_heads * head_size)] * num_layers


# Blocks -------------------------------------------------------------------------------------------


def _blocks(
    model: PreTrainedModel, quantizable: set[str], caches: Sequence[LayerCache]
) -> tuple[Block, ...]:
    """Divide the model into pieces for devices; pieces that share tensors are one block.

    A Llama with tied embeddings has the pieces `model.embed_tokens`, `model.layers.0`, ...,
    `model.norm` and `lm_head`. The first and the last share a matrix: they are one block.
    """
    pieces: dict[str, _Tensors] = {name: {} for name in _piece_names(model)}
    # The module that fills each layer's cache: the first one with the layer's number.
    cache_modules: dict[object, str] = {}
    for module_name, module in model.named_modules(remove_duplicate=False):
        layer = getattr(module, "layer_idx", getattr(module, "layer_id", None))
        cache_modules.setdefault(layer, module_name)
        for name, tensor in own_tensors(module, module_name):
            sketch = sketch_tensor(model, module, name, tensor, module_name in quantizable)
            pieces[covering(name, pieces)].setdefault(id(tensor), sketch)
    pieces = {name: tensors for name, tensors in pieces.items() if tensors}
    cache_modules.pop(None, None)

    blocks: list[Block] = []
    # The number of the block that has each tensor.
    block_of: dict[int, int] = {}
    # Caches of layers whose modules have no number count for the first piece.
    first_piece = next(iter(pieces))
    named = [
        dataclasses.replace(cache, module=cache_modules.get(layer, first_piece))
        for layer, cache in enumerate(caches)
    ]
    for name, tensors in pieces.items():
        new = tuple(sketch for key, sketch in tensors.items() if key not in block_of)
        piece_caches = tuple(cache for cache in named if covering(cache.module, pieces) == name)
        number = next((block_of[key] for key in tensors if key in block_of), len(blocks))
        if number == len(blocks):
            blocks.append(Block((), ()))
        block = blocks[number]
        blocks[number] = Block(
            (*block.modules, name), (*block.tensors, *new), (*block.caches, *piece_caches)
        )
        for key in tensors:
            block_of.setdefault(key, number)
    return tuple(blocks)


def _piece_names(model: PreTrainedModel) -> list[str]:
    """Modules that cannot be split, and the tensors that are outside of these.

    A module cannot be split if transformers says so, or if it has no modules inside. Where
    transformers names no such modules, the whole model is one piece.
    """
    indivisible = set(model._no_split_modules or ())
    if not indivisible:
        return [""]
    names: list[str] = []
    last_piece: str | None = None
    for name, module in model.named_modules(remove_duplicate=False):
        if last_piece is not None and name.startswith(f"{last_piece}."):
            continue
        has_children = any(True for _ in module.children())
        if type(module).__name__ in indivisible or not has_children:
            last_piece = name
            names.append(name)
        else:
            names += [tensor_name for tensor_name, _ in own_tensors(module, name)]
    return names


# Tensors ------------------------------------------------------------------------------------------


def own_tensors(module: nn.Module, module_name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Full names and tensors of a module's parameters and buffers; none of modules inside."""
    yield from module.named_parameters(module_name, recurse=False)
    yield from module.named_buffers(module_name, recurse=False)


def sketch_tensor(
    model: PreTrainedModel, module: nn.Module, name: str, tensor: torch.Tensor, quantizable: bool
) -> TensorSketch:
    """The sizes of a parameter or buffer.

    Args:
        module: owner of the tensor.
        name: full name of the tensor.
        quantizable: whether bitsandbytes would quantize the module's weight.
    """
    if not isinstance(tensor, nn.Parameter):
        return TensorSketch(name, tensor.numel(), tensor.itemsize, read_per_token=0.0)
    is_weight = name.rpartition(".")[2] == "weight"
    count = tensor.numel()
    itemsize = None
    # By name, so that nothing here imports bitsandbytes.
    kind = type(module).__name__ if is_weight else ""
    if kind == "Linear8bitLt":
        count, itemsize = eight_bit_bytes(count, len(tensor)), 1
    elif kind == "Linear4bit":
        weight: Any = tensor
        is_nested = bool(weight.compress_statistics)
        count, itemsize = four_bit_bytes(count, int(weight.blocksize), nested=is_nested), 1
    elif not tensor.is_floating_point() or tensor.itemsize < 2:
        # Another library has quantized it.
        itemsize = tensor.itemsize
    outputs = 0
    if is_weight and quantizable:
        # Conv1D has its weight as [inputs, outputs], others as [outputs, inputs].
        outputs = tensor.shape[1] if isinstance(module, Conv1D) else tensor.shape[0]
    return TensorSketch(
        name,
        count,
        itemsize,
        outputs=outputs,
        read_per_token=_read_share(model, module, name, tensor),
    )


def _read_share(
    model: PreTrainedModel, module: nn.Module, name: str, parameter: torch.Tensor
) -> float:
    """Share of a parameter that a forward pass of one token reads."""
    if isinstance(module, nn.Embedding):
        # A lookup reads one row; the same matrix as output layer is read whole.
        output = getattr(model.get_output_embeddings(), "weight", None)
        return 1.0 if parameter is output else 0.0
    config = model.config.get_text_config(decoder=True)
    num_experts = _first_number(config, _NUM_EXPERTS)
    num_used = _first_number(config, _NUM_USED)
    if not num_experts or not num_used:
        return 1.0
    # JetMoE has all experts of a layer in one tensor, in a module of another name.
    is_stack = parameter.dim() == 3 and len(parameter) == num_experts
    return num_used / num_experts if ".experts." in name or is_stack else 1.0


def _first_number(config: PreTrainedConfig, names: Sequence[str]) -> int | None:
    """The first of these fields that a configuration has with a number."""
    numbers = (getattr(config, name, None) for name in names)
    return next((number for number in numbers if isinstance(number, int)), None)
