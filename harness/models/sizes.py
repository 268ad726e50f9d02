"""How many bytes a model will take, module by module, known from its configuration before any weights load."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.quantizers.auto import AutoHfQuantizer

from harness.config.settings import Quantization
from harness.models.checkpoints import Checkpoint
from harness.models.quantization import bitsandbytes_config, stored_quantization

DeviceMap = dict[str, int | str]


def empty_model(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    quantization: Quantization = "none",
    device_map: DeviceMap | None = None,
) -> PreTrainedModel:
    """The model on the meta device, each of its tensors as many bytes large as the loaded one will be.

    Linear weights that bitsandbytes will quantize are shown as that many uint8, scales included; embeddings, norms and
    the output layer stay in `dtype`, as bitsandbytes leaves them, and so does what `device_map` offloads.

    Args:
        checkpoint: whose configuration is built.
        dtype: of everything that is not quantized.
        quantization: what bitsandbytes is asked for; a repository that is quantized already is built as it is.
        device_map: where the modules will lie, if some of them lie outside the GPUs.
    """
    model = bare_model(checkpoint, dtype)
    stored = stored_quantization(checkpoint.config) is not None
    settings: Any = bitsandbytes_config(quantization, dtype, offloaded=device_map is not None)
    if stored:
        settings = model.config.quantization_config
    if settings is not None:
        # The same replacement of modules that loading makes.
        quantizer: Any = AutoHfQuantizer.from_config(settings, pre_quantized=stored)
        with init_empty_weights(include_buffers=True), _default_dtype(dtype):
            quantizer.preprocess_model(model=model, dtype=dtype, device_map=device_map)
    for module in model.modules():
        held = _quantized_bytes(module)
        if held is not None:
            module.weight = nn.Parameter(torch.empty(held, dtype=torch.uint8, device="meta"), requires_grad=False)
    return model


def count_parameters(checkpoint: Checkpoint) -> int:
    """Parameters of the architecture, quantized or not; a tensor that two modules share counts once."""
    model = bare_model(checkpoint, torch.float32)
    return sum(parameter.numel() for parameter in model.parameters())


def bytes_per_device(model: nn.Module, device_map: Mapping[str, int | str]) -> dict[str, int]:
    """Bytes of the tensors of `model` on each device of the map; a tensor that two modules share counts once."""
    total: dict[str, int] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        device = device_name(device_map[covering(name, device_map)])
        total[device] = total.get(device, 0) + tensor.numel() * tensor.element_size()
    return total


def device_name(device: int | str) -> str:
    """`cuda:0` for a GPU's index; `cpu` and `disk` as they are."""
    return f"cuda:{device}" if isinstance(device, int) else device


def bare_model(checkpoint: Checkpoint, dtype: torch.dtype) -> PreTrainedModel:
    """The model as its configuration says, on the meta device, nothing quantized."""
    factory: Any = AutoModelForCausalLM
    with init_empty_weights(include_buffers=True):
        model: PreTrainedModel = factory.from_config(
            # A copy: the model writes into its configuration, and the checkpoint's is what will be loaded.
            copy.deepcopy(checkpoint.config),
            dtype=dtype,
            trust_remote_code=checkpoint.settings.trust_remote_code,
        )
    model.tie_weights()
    return model


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """New parameters are made in `dtype`, as they are while transformers loads."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(previous)


def _quantized_bytes(module: nn.Module) -> int | None:
    """Bytes that bitsandbytes keeps of the weight of `module`, scales included; None for any other module."""
    # By name, so that nothing here imports bitsandbytes.
    kind, weight = type(module).__name__, cast(Any, getattr(module, "weight", None))
    if kind not in ("Linear8bitLt", "Linear4bit"):
        return None
    size = int(weight.numel())
    if kind == "Linear8bitLt":
        # int8, and one float32 scale for each output.
        return size + 4 * int(weight.shape[0])
    blocks = math.ceil(size / int(weight.blocksize))
    # Two to a byte, and the 16 values that they stand for, in float32.
    held = math.ceil(size / 2) + 16 * 4
    if not weight.compress_statistics:
        return held + 4 * blocks
    # Scales in 8 bits; for every 256 of them one of their own in float32; their offset and table of 256 values.
    return held + blocks + 4 * math.ceil(blocks / 256) + 4 + 256 * 4


def covering(name: str, device_map: Mapping[str, int | str]) -> str:
    """The key of `device_map` that decides about the tensor `name`: its longest prefix."""
    while name not in device_map:
        name = name.rpartition(".")[0]
    return name
