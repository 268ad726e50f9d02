"""From a configuration to a `Sketch`: the model is built once on the meta device, where tensors have no memory."""

from __future__ import annotations

import copy
import importlib.util
import re
from collections.abc import Mapping
from typing import Any, cast

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.auto import AutoHfQuantizer
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from harness.models.checkpoints import Checkpoint, recurrent_kind
from harness.models.failures import explain_configuration
from harness.models.quantization import stored_quantization
from harness.models.sketch import Block, Part, Sketch, eight_bit_bytes, four_bit_bytes
from harness.models.tokenizers import vocabulary_size

# Whose output holds the keys, so that splitting it splits the cache.
_KEY_PROJECTIONS = ("k_proj", "qkv_proj", "query_key_value")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_HEADS = {"attention": "num_attention_heads", "key and value": "num_key_value_heads"}


def bare_model(checkpoint: Checkpoint, dtype: torch.dtype) -> PreTrainedModel:
    """The model of the configuration, on the meta device, nothing quantized."""
    factory: Any = AutoModelForCausalLM
    # A copy: the model writes into its configuration, and the checkpoint's is the one to load.
    config, trust = copy.deepcopy(checkpoint.config), checkpoint.settings.trust_remote_code
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
    """Build the model on the meta device and take down its sizes."""
    model = bare_model(checkpoint, dtype)
    settings, stored = checkpoint.settings, stored_quantization(checkpoint.config)
    text, plan = checkpoint.config.get_text_config(decoder=True), model.tp_plan or {}
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    told = _caches(model)
    caches = told or _configured_caches(checkpoint.config)
    matrices: set[str] = set()
    if stored is not None:
        # The same replacement of modules that loading makes.
        quantizer: Any = AutoHfQuantizer.from_config(
            model.config.quantization_config, pre_quantized=True
        )
        with init_empty_weights(include_buffers=True):
            quantizer.preprocess_model(model=model, dtype=dtype, device_map=None)
    elif settings.gguf_file is None:
        matrices = _matrices(model)
    colwise = {name.rpartition(".")[2] for name, style in plan.items() if style == "colwise"}
    return Sketch(
        role=checkpoint.role,
        settings=settings,
        dtype=dtype,
        blocks=_blocks(model, matrices, caches),
        quantization="none" if stored is not None else settings.quantization,
        stored=stored,
        num_parameters=num_parameters,
        vocabulary_size=vocabulary_size(checkpoint.config),
        class_name=type(model).__name__,
        modules=frozenset(name for name, _ in model.named_modules()),
        heads={
            kind: n
            for kind, name in _HEADS.items()
            if isinstance(n := getattr(text, name, None), int)
        },
        tp_plan=bool(plan),
        splits_cache=not colwise.isdisjoint(_KEY_PROJECTIONS),
        estimated_cache=not told,
    )


def _caches(model: PreTrainedModel) -> list[tuple[int, int]]:
    """By layer, numbers of keys and values for one token of one row, and bytes of a row's recurrent state.

    A token passes through the model without memory, so that grouped heads, latent attention and other kinds count as
    they are. Windows do not: the runner keeps every slot. Empty where the model's code looks at numbers: here are none.
    """
    try:
        with torch.inference_mode():
            # Other kinds of attention may look for padding in the mask, which has no numbers here, some models look for
            # it in the tokens, and other ways to run experts count the tokens of each.
            model.config.pad_token_id = None
            model.set_attn_implementation("eager")
            model.set_experts_implementation("batched_mm")
            output: Any = model(
                input_ids=torch.zeros(1, 1, dtype=torch.long, device="meta"), use_cache=True
            )
        layers = (getattr(output, "past_key_values", None) or output.cache_params).layers
    except Exception:
        return []
    return [
        (
            sum(tensor.numel() for name, tensor in _tensors(layer) if name in ("keys", "values")),
            sum(tensor.nbytes for name, tensor in _tensors(layer) if name.endswith("_states")),
        )
        for layer in layers
    ]


def _configured_caches(config: PreTrainedConfig) -> list[tuple[int, int]]:
    """The same as `_caches`, by the numbers of layers and heads; empty where these do not tell it."""
    text = config.get_text_config(decoder=True)
    names = ("num_hidden_layers", "num_attention_heads", "hidden_size")
    sizes = [getattr(text, name, None) for name in names]
    if recurrent_kind(config) is not None or not all(isinstance(size, int) for size in sizes):
        return []
    num_layers, num_heads, width = (int(size or 0) for size in sizes)
    num_key_heads = getattr(text, "num_key_value_heads", None) or num_heads
    head_size = getattr(text, "head_dim", None) or width // num_heads
    return [(2 * num_key_heads * head_size, 0)] * num_layers


def _tensors(layer: Any) -> list[tuple[str, torch.Tensor]]:
    """Those of a layer's cache by the name of their attribute, which may have several by number."""
    held = (
        (name, one.values() if isinstance(one, dict) else [one])
        for name, one in vars(layer).items()
    )
    return [
        (name, tensor) for name, own in held for tensor in own if isinstance(tensor, torch.Tensor)
    ]


def _matrices(model: PreTrainedModel) -> set[str]:
    """Modules whose weight bitsandbytes quantizes: those that transformers replaces while loading."""
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


def _blocks(
    model: PreTrainedModel, matrices: set[str], caches: list[tuple[int, int]]
) -> tuple[Block, ...]:
    """The model in pieces that may be on different devices; in one piece where it does not say where to split it.

    Args:
        matrices: modules whose weight bitsandbytes would quantize.
        caches: see `_caches`.
    """
    indivisible = set(model._no_split_modules or ())
    # Tensors by id, so that those which two modules share count once; which of them are in each piece; and in which
    # piece and module each layer's cache is made.
    parts: dict[int, Part] = {}
    pieces: dict[str, list[int]] = {}
    makers: dict[object, tuple[str, str]] = {}
    piece: str | None = None
    for name, module in model.named_modules(remove_duplicate=False):
        if piece is None or (piece and not name.startswith(f"{piece}.")):
            whole = (
                not indivisible
                or type(module).__name__ in indivisible
                or next(module.children(), None) is None
            )
            piece = name if whole else None
        if piece is not None:
            makers.setdefault(
                getattr(module, "layer_idx", getattr(module, "layer_id", None)), (piece, name)
            )
        for own, tensor in [
            *module.named_parameters(recurse=False),
            *module.named_buffers(recurse=False),
        ]:
            full = f"{name}.{own}" if name else own
            pieces.setdefault(full if piece is None else piece, []).append(id(tensor))
            if id(tensor) not in parts:
                parts[id(tensor)] = part_of(model, module, full, tensor, name in matrices)
    blocks: list[tuple[list[str], list[Part], dict[str, tuple[int, int]]]] = []
    block_of: dict[int | str, int] = {}
    for name, held in pieces.items():
        # A tensor that an earlier block has keeps both together.
        index = block_of[name] = min(
            (block_of[one] for one in held if one in block_of), default=len(blocks)
        )
        if index == len(blocks):
            blocks.append(([], [], {}))
        blocks[index][0].append(name)
        for one in held:
            if one not in block_of:
                block_of[one] = index
                blocks[index][1].append(parts[one])
    for layer, cached in enumerate(caches):
        piece, maker = makers.get(layer, (next(iter(pieces)),) * 2)
        made = blocks[block_of[piece]][2]
        # Layers that say no number are all made by one.
        before = made.get(maker, (0, 0))
        made[maker] = before[0] + cached[0], before[1] + cached[1]
    return tuple(Block(tuple(names), tuple(own), made) for names, own, made in blocks)


def part_of(
    model: PreTrainedModel, module: nn.Module, name: str, tensor: torch.Tensor, is_matrix: bool
) -> Part:
    """A parameter or buffer of a module; `is_matrix` if bitsandbytes would quantize the module's weight."""
    if not isinstance(tensor, nn.Parameter):
        return Part(name, tensor.numel(), tensor.itemsize, read=0.0)
    is_weight = name.rpartition(".")[2] == "weight"
    stored = _stored_bytes(module) if is_weight else None
    # What is narrower than two bytes was quantized by another library.
    floating = tensor.is_floating_point() and tensor.itemsize > 1
    read = 1.0
    if isinstance(module, nn.Embedding) and tensor is not getattr(
        model.get_output_embeddings(), "weight", None
    ):
        # A lookup reads one row; the same matrix as output layer is read whole.
        read = 0.0
    elif ".experts." in name:
        config = model.config.get_text_config(decoder=True)
        numbers = (getattr(config, number, None) for number in _EXPERTS)
        num_experts, used = (
            next(filter(None, numbers), None),
            getattr(config, "num_experts_per_tok", None),
        )
        read = used / num_experts if used and num_experts else 1.0
    return Part(
        name,
        tensor.numel() if stored is None else stored,
        1 if stored is not None else None if floating else tensor.itemsize,
        outputs=tensor.shape[isinstance(module, Conv1D)] if is_weight and is_matrix else 0,
        read=read,
        split=_split_length(model.tp_plan or {}, name, tensor),
    )


def _stored_bytes(module: nn.Module) -> int | None:
    """Bytes of a weight that is stored as bitsandbytes quantized it, scales included; None for any other module."""
    # By name, so that nothing here imports bitsandbytes.
    kind, weight = type(module).__name__, cast(Any, getattr(module, "weight", None))
    if kind == "Linear8bitLt":
        return eight_bit_bytes(int(weight.numel()), int(weight.shape[0]))
    if kind == "Linear4bit":
        return four_bit_bytes(
            int(weight.numel()), int(weight.blocksize), nested=bool(weight.compress_statistics)
        )
    return None


def _split_length(plan: Mapping[str, str], name: str, parameter: torch.Tensor) -> int:
    """Length of the dimension along which the plan splits a parameter; 0 where every rank has all of it."""
    generic = re.sub(r"\.\d+\.", ".*.", name)
    owner, _, kind = generic.rpartition(".")
    style = plan.get(generic) or plan.get(owner) or ""
    if style.startswith("embedding"):
        return parameter.shape[0 if style == "embedding_rowwise" else 1]
    if style == "grouped_gemm":
        return parameter.shape[0]
    if "colwise" in style:
        # Weights are [..., outputs, inputs], biases [outputs].
        return parameter.shape[max(0, parameter.ndim - 2)]
    return parameter.shape[-1] if "rowwise" in style and kind != "bias" else 0
