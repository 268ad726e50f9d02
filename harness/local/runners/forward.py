"""A model's forward pass over slots, with attention over grouped heads without copies of their keys and values."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import GenerationMixin, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from harness.local.models.cache_names import cache_name
from harness.local.runners.base import (
    Options,
    UnsupportedModelError,
    captured,
    capturing,
    clamp_positions,
    context_of,
)
from harness.local.runners.slots import SlotCache

# Names of attention in transformers: torch's own, and `packed_attention`.
_PLAIN = "sdpa"
_PACKED = "sdpa_packed"

# Layer types whose masks `SlotForward` makes, by their names in transformers' configurations.
_FULL = "full_attention"
_SLIDING = "sliding_attention"
# In place of a layer type where all layers share one mask, which is then given alone.
_SHARED = ""


class SlotForward:
    """Runs a model over slots, as a function of tensors alone, so that it can be compiled. Every
    call stands in a `with` block of `packing`.

    Raises UnsupportedModelError if positions or masks cannot be given to the model explicitly.
    """

    def __init__(self, model: PreTrainedModel, options: Options) -> None:
        self.packing = HeadPacking(model)
        self._model = model
        self._options = options
        self._windows = _attention_windows(model)
        self._context = context_of(model)
        self._cache_name = cache_name(model)
        self._constant_arguments = {"use_cache": True, **capturing(options)}
        attention = model.config.get_text_config()._attn_implementation
        self._single_token_needs_masks = attention != _PLAIN or any(self._windows.values())

    def __call__(
        self, cache: SlotCache, width: int, tokens: Tensor, starts: Tensor | int
    ) -> tuple[Tensor, ...]:
        """Write tokens [B, n] into the slots from starts [B] on; returns what `captured` does.

        Args:
            width: how many slots of each row attention reads.
            starts: a number where it is the same for all rows, which is faster. A single token
                then has no mask, so that `width` must be `starts + 1`.
        """
        num_tokens = tokens.shape[1]
        are_alike = isinstance(starts, int)
        if isinstance(starts, int):
            cache.place_alike(starts, num_tokens, tokens.device)
        else:
            cache.place(starts, num_tokens)
        cache.width = width
        masks = None
        # Kernels are faster without a mask, and a single token sees all slots that attention
        # reads.
        if num_tokens > 1 or self._single_token_needs_masks or not are_alike:
            masks = self._masks(cache)
        output = self._model(
            input_ids=tokens,
            attention_mask=masks,
            position_ids=clamp_positions(cache.positions, width, self._context),
            **{self._cache_name: cache},
            **self._constant_arguments,
        )
        return captured(self._options, output)

    def _masks(self, cache: SlotCache) -> Tensor | dict[str, Tensor]:
        """Make masks [1 or B, 1, n, S] that are added to scores, of the tokens that are written next: one for each type
        of layer, or a single one where all layers share it.

        Where heads are packed (`HeadPacking`), each token is as many queries as heads share a key.
        """
        dtype = cache.buffers[0][0].dtype
        masked = torch.finfo(dtype).min
        # A token's slot is its position, so slots are compared as positions.
        queries = cache.positions.repeat(1, self.packing.heads_per_key).unsqueeze(2)
        positions = torch.arange(cache.width, device=queries.device)
        seen = positions <= queries
        masks = {}
        for name, window in self._windows.items():
            visible = seen if window is None else seen & (positions > queries - window)
            masks[name] = torch.where(visible.unsqueeze(1), 0.0, masked).to(dtype)
        return masks.get(_SHARED, masks)


def _attention_windows(model: PreTrainedModel) -> dict[str, int | None]:
    """Return the sliding window of each type of layer, None without one; under `_SHARED`
    where all share a mask.

    Raises UnsupportedModelError for a model that makes its own masks or positions.

    Mirrors how `generate` chooses masks for static caches,
    `transformers.masking_utils.create_masks_for_generate`.
    """
    config = model.config.get_text_config()
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise UnsupportedModelError("takes no positions")
    if getattr(config, "alibi", False):
        raise UnsupportedModelError("reads positions from its mask (ALiBi)")
    makes_masks = getattr(type(model), "create_masks_for_generate", None)
    if makes_masks is not getattr(GenerationMixin, "create_masks_for_generate", None):
        raise UnsupportedModelError("makes its own masks")
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if types is None:
        if getattr(config, "attention_chunk_size", None) is not None:
            raise UnsupportedModelError("attends in chunks")
        return {_SHARED: window}
    if unknown := set(types) - {_FULL, _SLIDING}:
        raise UnsupportedModelError(f"has layers of type {', '.join(sorted(unknown))}")
    return {name: window if name == _SLIDING else None for name in sorted(set(types))}


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
        is_plain = model.config.get_text_config()._attn_implementation == _PLAIN
        self.heads_per_key = int(groups.pop()) if is_plain and len(groups) == 1 else 1
        # The attributes of each configuration that attention asks for its implementation.
        self._configs: dict[int, dict[str, Any]] = {}
        if self.heads_per_key > 1:
            for module in modules:
                if hasattr(module, "config"):
                    self._configs[id(module.config)] = vars(module.config)
        ALL_ATTENTION_FUNCTIONS.register(_PACKED, packed_attention)
        ALL_MASK_ATTENTION_FUNCTIONS.register(_PACKED, ALL_MASK_ATTENTION_FUNCTIONS[_PLAIN])

    def __enter__(self) -> None:
        self._set_attention(_PACKED)

    def __exit__(self, *_: object) -> None:
        self._set_attention(_PLAIN)

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
) -> tuple[Tensor, None]:
    """Attend from queries [B, heads, n, D] to keys and values [B, key heads, S, D] -> [B, n, heads,
    D].

    Args:
        attention_mask: of packed heads; None for a single query, which sees all.
    """
    num_rows, num_heads, num_queries, size = query.shape
    packed = query.reshape(num_rows, key.shape[1], -1, size)
    output = scaled_dot_product_attention(
        packed, key, value, attn_mask=attention_mask, scale=scaling
    )
    # Kernels on a GPU leave the heads behind the queries in memory, so that these two are split
    # before they are joined.
    output = output.view(num_rows, key.shape[1], -1, num_queries, output.shape[-1])
    output = output.permute(0, 3, 1, 2, 4)
    return output.reshape(num_rows, num_queries, num_heads, -1), None
