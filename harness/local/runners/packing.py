"""Attention over grouped heads without copies of their keys and values."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

# Names of attention in transformers: torch's own, and `packed_attention`.
PLAIN = "sdpa"
_PACKED = "sdpa_packed"


class HeadPacking:
    """Within its `with` block a model whose heads share keys takes masks [1 or B, 1, heads per key
    * n, S] for n queries: heads that share their keys count as more queries of one head.

    transformers copies keys and values for each such head wherever there are a mask and several
    queries. Over a long context that takes longer than the attention itself, and every kernel
    computes the same without.

    With 8 heads on 2 keys and 5 tokens, attention gets 20 queries for each of 2 heads instead of 5
    queries for each of 8. Outside the block the model is as it was.

    Attributes:
        heads_per_key: 1 if they share none.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        modules: list[Any] = list(model.modules())
        groups = {
            module.num_key_value_groups
            for module in modules
            if hasattr(module, "num_key_value_groups")
        }
        is_plain = model.config.get_text_config()._attn_implementation == PLAIN
        self.heads_per_key = int(groups.pop()) if is_plain and len(groups) == 1 else 1
        # The attributes of each configuration that attention asks for its implementation.
        self._configs: dict[int, dict[str, Any]] = {}
        if self.heads_per_key > 1:
            for module in modules:
                if hasattr(module, "config"):
                    self._configs[id(module.config)] = vars(module.config)
        ALL_ATTENTION_FUNCTIONS.register(_PACKED, packed_attention)
        ALL_MASK_ATTENTION_FUNCTIONS.register(_PACKED, ALL_MASK_ATTENTION_FUNCTIONS[PLAIN])

    def __enter__(self) -> None:
        self._set_attention(_PACKED)

    def __exit__(self, *_: object) -> None:
        self._set_attention(PLAIN)

    def _set_attention(self, name: str) -> None:
        for config in self._configs.values():
            # The property would also set it for configurations inside, which may have other users, and
            # huggingface_hub's attributes check each value.
            config["_attn_implementation_internal"] = name


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
