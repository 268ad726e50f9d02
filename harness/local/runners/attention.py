"""Attention over a cache of fixed size in which heads that share their keys count as more queries
of one head.

transformers copies keys and values for each such head wherever there are a mask and several
queries. Over a long context that takes longer than the attention itself, and every kernel computes
the same without. `without_cudnn` chooses among torch's kernels.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.backends.cuda import cudnn_sdp_enabled, enable_cudnn_sdp
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

# Names of attention in transformers: torch's own, and the function below.
PLAIN = "sdpa"
PACKED = "sdpa_packed"


class HeadPacking:
    """Makes a model accept masks [1 or B, 1, heads per key * n, S], if its heads share keys.

    With masks of n queries, and without one, the model computes what it did before. With 8 heads on
    2 keys and 5 tokens, attention gets 20 queries for each of 2 heads instead of 5 queries for each
    of 8.

    The model has its own attention again when all who packed it have called `undo`, or are gone.

    Attributes:
        heads_per_key: 1 if they share none.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.heads_per_key = 1
        shares: set[Any] = {
            getattr(module, "num_key_value_groups", None) for module in model.modules()
        } - {None}
        implementation = model.config.get_text_config()._attn_implementation
        if len(shares) == 1 and implementation in (PLAIN, PACKED):
            (self.heads_per_key,) = map(int, shares)
        configs = _configs(model) if self.heads_per_key > 1 else []
        ALL_ATTENTION_FUNCTIONS.register(PACKED, packed_attention)
        ALL_MASK_ATTENTION_FUNCTIONS.register(PACKED, ALL_MASK_ATTENTION_FUNCTIONS[PLAIN])
        for config in configs:
            _pack(config)
        # Also undoes it for an owner that is dropped instead of closed.
        self.undo = weakref.finalize(self, _unpack, configs)


@dataclass
class _PackedConfig:
    """A configuration that names `PACKED`, and what it named before."""

    config: Any
    before: Any
    num_users: int = 0


# By the identity of the configuration: two models may share layers and with them a configuration.
_packed: dict[int, _PackedConfig] = {}


def _configs(model: PreTrainedModel) -> list[Any]:
    """Return the configurations of a model and its modules, with those inside them."""
    waiting = [getattr(module, "config", None) for module in model.modules()]
    configs: dict[int, Any] = {}
    while waiting:
        config = waiting.pop()
        if config is None or id(config) in configs:
            continue
        configs[id(config)] = config
        for name in getattr(config, "sub_configs", ()):
            waiting.append(getattr(config, name, None))
    return list(configs.values())


def _pack(config: Any) -> None:
    packed = _packed.get(id(config))
    if packed is None:
        before = config._attn_implementation
        # A configuration that was copied from a packed one.
        before = PLAIN if before == PACKED else before
        packed = _packed[id(config)] = _PackedConfig(config, before)
    packed.num_users += 1
    _set_attention(config, PACKED)


def _unpack(configs: Sequence[Any]) -> None:
    for config in configs:
        packed = _packed[id(config)]
        packed.num_users -= 1
        if not packed.num_users:
            _set_attention(config, packed.before)
            del _packed[id(config)]


def _set_attention(config: Any, implementation: Any) -> None:
    """Set it for this configuration, and not for those inside it, which may have other users."""
    config._attn_implementation_internal = implementation


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend from queries [B, heads, n, D] to keys and values [B, key heads, S, D] -> [B, n, heads,
    D].
    """
    num_rows, num_heads, num_queries, size = query.shape
    num_key_heads = key.shape[1]
    num_packed = num_heads // num_key_heads * num_queries
    # Without a mask several queries are a prompt's, each of which sees those before it.
    is_single = attention_mask is None and num_queries == 1
    has_packed_mask = attention_mask is not None and attention_mask.shape[-2] == num_packed
    has_bias = any(options.get(name) is not None for name in ("position_bias", "softcap"))
    if has_bias or not (is_single or has_packed_mask):
        if attention_mask is not None:
            # Of a mask for packed queries, those of one head: all heads see the same slots.
            attention_mask = attention_mask[:, :, :num_queries]
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **options
        )
    query = query.reshape(num_rows, num_key_heads, num_packed, size)
    output = scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, scale=scaling
    )
    # Kernels on a GPU leave the heads behind the queries in memory, so that these two are split
    # before they are joined.
    output = output.view(num_rows, num_key_heads, -1, num_queries, output.shape[-1]).permute(
        0, 3, 1, 2, 4
    )
    return output.reshape(num_rows, num_queries, num_heads, -1), None


@contextmanager
def without_cudnn() -> Iterator[None]:
    """Compute attention with other kernels than cuDNN's within this block.

    On Hopper and Blackwell torch 2.11 prefers cuDNN, which makes a plan for every size that it has
    not seen. That takes long where sizes change from pass to pass.
    """
    enabled = cudnn_sdp_enabled()
    enable_cudnn_sdp(False)
    try:
        yield
    finally:
        enable_cudnn_sdp(enabled)
