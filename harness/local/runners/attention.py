"""Attention over a cache of fixed size in which heads that share their keys count as more queries
of one head.

transformers copies keys and values for each such head wherever there are a mask and several
queries. Over a long context that takes longer than the attention itself, and every kernel computes
the same without. `without_cudnn` chooses among torch's kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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
_PACKED = "sdpa_packed"


class HeadPacking:
    """Within its `with` block a model whose heads share keys takes masks [1 or B, 1, heads per key
    * n, S] for n queries.

    With 8 heads on 2 keys and 5 tokens, attention gets 20 queries for each of 2 heads instead of 5
    queries for each of 8. Outside the block the model is as it was.

    Attributes:
        heads_per_key: 1 if they share none.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.heads_per_key = 1
        groups = {getattr(module, "num_key_value_groups", None) for module in model.modules()}
        groups.discard(None)
        is_plain = model.config.get_text_config()._attn_implementation == PLAIN
        configs: dict[int, Any] = {}
        if is_plain and len(groups) == 1:
            self.heads_per_key = int(groups.pop())  # type: ignore[arg-type]
        if self.heads_per_key > 1:
            for module in model.modules():
                config = getattr(module, "config", None)
                if config is not None:
                    configs[id(config)] = config
        self._configs = list(configs.values())
        ALL_ATTENTION_FUNCTIONS.register(_PACKED, packed_attention)
        ALL_MASK_ATTENTION_FUNCTIONS.register(_PACKED, ALL_MASK_ATTENTION_FUNCTIONS[PLAIN])

    def __enter__(self) -> None:
        self._set_attention(_PACKED)

    def __exit__(self, *_: object) -> None:
        self._set_attention(PLAIN)

    def _set_attention(self, name: str) -> None:
        for config in self._configs:
            # The property would also set it for configurations inside, which may have other users.
            config._attn_implementation_internal = name


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
