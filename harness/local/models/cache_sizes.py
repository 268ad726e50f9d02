"""How large the cache of each layer is, before any weights load.

It is measured, by one token that passes through the model on the meta device, or estimated from the
configuration where a model's code does not run there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

from harness.local.models.cache_names import cache_of
from harness.local.models.checkpoints import recurrent_kind
from harness.local.models.sketch import LayerCache

# By class, dtype and configuration: a pass takes much longer than building a model, and sweeps plan
# the same models again and again.
_known_caches: dict[tuple[object, ...], list[LayerCache]] = {}


def measured_caches(model: PreTrainedModel) -> Sequence[LayerCache]:
    """The caches of all layers after one token; empty if the model does not run on the meta device.

    `meta` finds out which module fills each. Equal models are measured once.
    """
    described = model.config.to_dict()
    # A copy in another directory is equal.
    described.pop("_name_or_path", None)
    identity = type(model), model.dtype, repr(described)
    if identity not in _known_caches:
        _known_caches[identity] = _caches_after_one_token(model)
    return _known_caches[identity]


def _caches_after_one_token(model: PreTrainedModel) -> list[LayerCache]:
    """Pass one token through a model without memory, and look at the cache that it returns.

    So grouped heads, latent attention and other kinds count as they are. The runner keeps every slot, whatever the
    window. A model whose code looks at numbers fails, because the meta device has
    none.
    """
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
        return []
    caches = [_layer_cache(layer) for layer in layers]
    return _with_windows(caches, layers, model.config)


def _with_windows(
    caches: Sequence[LayerCache], layers: Sequence[Any], config: PreTrainedConfig
) -> list[LayerCache]:
    """The caches with the windows that transformers' layers of a cache have."""
    text_config = config.get_text_config(decoder=True)
    # At its begin a chunk has few tokens before it, in the middle half of them.
    is_chunked = getattr(text_config, "attention_chunk_size", None) is not None
    found = []
    for cache, layer in zip(caches, layers, strict=True):
        window = getattr(layer, "sliding_window", None)
        if window is not None and is_chunked:
            window //= 2
        found.append(dataclasses.replace(cache, window=window))
    return found


def _layer_cache(layer: Any) -> LayerCache:
    """The size of one layer of transformers' cache, after one token of one row."""
    numbers_per_token = 0
    state_bytes = 0
    for name, value in vars(layer).items():
        # A layer with several states has a dictionary of them.
        tensors = value.values() if isinstance(value, dict) else [value]
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor):
                continue
            if name in ("keys", "values"):
                numbers_per_token += tensor.numel()
            elif name.endswith("_states"):
                state_bytes += tensor.nbytes
    return LayerCache(numbers_per_token=numbers_per_token, state_bytes=state_bytes)


def configured_caches(config: PreTrainedConfig) -> list[LayerCache]:
    """Estimate caches from the numbers of layers and heads; empty where these say too little."""
    text_config = config.get_text_config(decoder=True)
    num_layers = getattr(text_config, "num_hidden_layers", None)
    num_heads = getattr(text_config, "num_attention_heads", None)
    width = getattr(text_config, "hidden_size", None)
    if not (isinstance(num_layers, int) and isinstance(num_heads, int) and isinstance(width, int)):
        return []
    if recurrent_kind(config) is not None:
        return []
    caches = []
    # Layers may differ; older versions of transformers have one configuration for all.
    for own in getattr(text_config, "per_layer_config", [text_config] * num_layers):
        num_key_heads = getattr(own, "num_key_value_heads", None) or num_heads
        head_size = getattr(own, "head_dim", None) or width // num_heads
        caches.append(LayerCache(numbers_per_token=2 * num_key_heads * head_size))
    layers = DynamicCache(config=config).layers
    return _with_windows(caches, layers, config) if len(layers) == num_layers else caches
