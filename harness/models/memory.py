"""What decoding needs beside weights: room for the KV cache, and the bytes that one forward reads, which bound it.

Making one token reads every weight and the whole cache once, whatever else happens: bytes over bandwidth is a time that
no implementation of these models beats (the memory-bound side of Williams et al. 2009, "Roofline").
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from harness.models.checkpoints import Checkpoint
from harness.models.sizes import DeviceMap, bare_model, covering, device_name


@dataclass(frozen=True)
class Gpu:
    """A GPU as its maker sells it.

    Attributes:
        pattern: what torch calls it, as a regular expression.
        memory_gb: as sold, `40` for 40 GB.
        bandwidth_gb_s: of its memory, in 10^9 bytes a second; where sources differ, the higher figure.
    """

    name: str
    pattern: str
    memory_gb: int
    bandwidth_gb_s: int


# From the makers' data sheets. The first whose pattern is found in a device's name is taken.
GPUS = (
    Gpu("B200", r"\bB200", 192, 8000),
    Gpu("H200", r"\bH200", 141, 4800),
    Gpu("H100 SXM", r"H100.*HBM3|H100 SXM", 80, 3350),
    Gpu("H100 PCIe", "H100.*PCIe", 80, 2000),
    Gpu("H100 NVL", "H100 NVL", 94, 3900),
    Gpu("A100 SXM 80GB", r"A100-SXM.*80GB", 80, 2039),
    Gpu("A100 PCIe 80GB", r"A100.*80GB", 80, 1935),
    Gpu("A100 40GB", r"A100.*40GB", 40, 1555),
    Gpu("MI300X", "MI300X", 192, 5300),
    Gpu("L40S", "L40S", 48, 864),
    Gpu("A40", r"\bA40\b", 48, 696),
    Gpu("RTX 6000 Ada", "RTX 6000 Ada", 48, 960),
    Gpu("RTX A6000", "RTX A6000", 48, 768),
    Gpu("RTX 5090", r"RTX 5090(?! Laptop)", 32, 1792),
    Gpu("RTX 4090", r"RTX 4090(?! Laptop)", 24, 1008),
    Gpu("RTX 3090", r"RTX 3090(?! Ti)", 24, 936),
    Gpu("A10G", r"\bA10G?\b", 24, 600),
    Gpu("L4", r"\bL4\b", 24, 300),
    Gpu("V100 32GB", r"V100.*32GB", 32, 900),
    Gpu("V100 16GB", r"V100.*16GB", 16, 900),
    Gpu("T4", r"\bT4\b", 16, 320),
)


def known_gpu(device: str) -> Gpu | None:
    """The GPU that torch calls `device`; None for one that is not in the table."""
    return next((gpu for gpu in GPUS if re.search(gpu.pattern, device)), None)


def cache_bytes_per_layer(checkpoint: Checkpoint, dtype: torch.dtype, batch_size: int, num_tokens: int) -> list[int]:
    """Bytes of keys and values, a layer each, of `batch_size` rows of `num_tokens` tokens.

    The model itself is asked, by a token that passes through it without memory, so that grouped heads, latent
    attention and whatever comes next count as they are. Windows are not: the runner keeps every slot.

    Returns:
        An empty list where a model cannot be asked: code from a repository may look at numbers, and here are none.
    """
    cache = DynamicCache()
    try:
        with torch.inference_mode():
            model = bare_model(checkpoint, dtype)
            # Other kinds of attention may look for a padding in the mask, which has no numbers here.
            model.set_attn_implementation("eager")
            token = torch.zeros(1, 1, dtype=torch.long, device="meta")
            model(input_ids=token, past_key_values=cache, use_cache=True)
        return [
            batch_size * num_tokens * (layer.keys.nbytes + layer.values.nbytes)  # type: ignore[union-attr]
            for layer in cache.layers
        ]
    except Exception:
        return []


def cache_bytes_per_device(model: PreTrainedModel, device_map: DeviceMap, per_layer: Sequence[int]) -> dict[str, int]:
    """Where the keys and values of `per_layer` come to lie: beside the layer that makes them."""
    gpus = [device for device in device_map.values() if isinstance(device, int)]
    # Layers that lie outside the GPUs, or on disk, are computed there.
    computed = dict.fromkeys(("cpu", "disk"), gpus[0] if gpus else "cpu")
    modules: dict[int, str] = {}
    for name, module in model.named_modules():
        index = getattr(module, "layer_idx", getattr(module, "layer_id", None))
        if isinstance(index, int):
            modules.setdefault(index, name)
    total: dict[str, int] = {}
    for index, held in enumerate(per_layer):
        device = device_map[covering(modules[index], device_map)] if index in modules else next(iter(gpus), "cpu")
        place = device_name(computed.get(str(device), device))
        total[place] = total.get(place, 0) + held
    return total


def bytes_read(model: PreTrainedModel) -> int:
    """Bytes of weights that one token's forward must read: all but embeddings that are looked up, and idle experts.

    Args:
        model: from `empty_model`.
    """
    return sum(bytes_read_per_device(model, {"": "cpu"}).values())


def bytes_read_per_device(model: PreTrainedModel, device_map: Mapping[str, int | str]) -> dict[str, int]:
    """`bytes_read` of each device, by `cuda:0`, `cpu` or `disk`."""
    output = model.get_output_embeddings()
    # A lookup reads one row; the same matrix as output layer is read whole.
    looked_up = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, nn.Embedding) and module.weight is not getattr(output, "weight", None)
    }
    config = model.config.get_text_config(decoder=True)
    counts = (getattr(config, name, None) for name in ("num_local_experts", "num_experts", "n_routed_experts"))
    num_experts = next(filter(None, counts), None)
    used = getattr(config, "num_experts_per_tok", None)
    share = used / num_experts if used and num_experts else 1.0
    total: dict[str, float] = {}
    for name, tensor in model.named_parameters():
        if id(tensor) not in looked_up:
            place = device_name(device_map[covering(name, device_map)])
            total[place] = total.get(place, 0.0) + tensor.nbytes * (share if ".experts." in name else 1.0)
    return {place: round(read) for place, read in total.items()}
