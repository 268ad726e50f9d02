"""The runner with a KV cache of fixed size. Every row has its own slots, and rolling back means to begin the next pass
at an earlier slot.

Nothing is moved or copied when a text grows, and attention reads no more slots than the longest row has. If the rows
have a fixed size (`fix`), all batches use the same rows, and a pass is a function of tensors, which can be compiled and
captured.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from harness.config.amounts import BUCKET, round_up
from harness.config.run import RunnerName
from harness.local.decoding.protocols import Runner, Step, TokenRows
from harness.local.decoding.state import Starts
from harness.local.decoding.transfer import padded, to_device
from harness.local.models.cache_names import cache_name
from harness.local.models.tokenizers import max_context
from harness.local.runners.base import (
    Options,
    UnsupportedModelError,
    chosen_outputs,
    clamp_positions,
    gather_rows,
    hidden_arguments,
    joined,
    logits_after,
)
from harness.local.runners.checks import ANY_LENGTH, check_runner
from harness.local.runners.compiled import Part, compiling, end_part
from harness.local.runners.slots import KeysAndValues, SlotCache

# The names of two attention implementations in transformers: torch's own, and `packed_attention`.
_PLAIN = "sdpa"
_PACKED = "sdpa_packed"

# The types of layers for which `SlotForward` makes masks, by their names in transformers' configurations.
_FULL = "full_attention"
_SLIDING = "sliding_attention"
# Used instead of a layer type if all layers have the same mask. The model is then given this mask itself, instead of a
# dictionary of masks by layer type.
_SHARED = ""


class SlotForward:
    """Runs a model with a `SlotCache`, as a function of tensors that can be compiled. Every call must be within a
    `with` block of `packing`.

    Raises:
        UnsupportedModelError: positions or masks cannot be given to the model explicitly.
    """

    def __init__(self, model: PreTrainedModel, options: Options) -> None:
        self.packing = HeadPacking(model)
        self._model = model
        self._options = options
        self._windows = _attention_windows(model)
        self._context = max_context(model.config)
        self._cache_name = cache_name(model)
        self._constant_arguments = {"use_cache": True, **hidden_arguments(options)}
        # Without a mask, torch's own attention lets a single token see all slots that are read. Of the other
        # implementations this is not known, and in layers with a window the oldest slots must be hidden.
        attention = model.config.get_text_config()._attn_implementation
        self._single_token_needs_masks = attention != _PLAIN or any(self._windows.values())

    def __call__(
        self, cache: SlotCache, width: int, tokens: Tensor, starts: Tensor | int
    ) -> tuple[Tensor, ...]:
        """Read tokens [B, n], and write their keys and values into the slots from `starts` on. Returns the logits and,
        if hidden states are requested, their states, as `chosen_outputs` does.

        Args:
            width: how many slots of each row attention reads.
            starts: [B], or one number for all rows, which is faster. If it is one number and n is 1, attention may run
                without a mask. Then `width` must be `starts + 1`.
        """
        num_tokens = tokens.shape[1]
        if isinstance(starts, int):
            cache.place_alike(starts, num_tokens, tokens.device)
        else:
            cache.place(starts, num_tokens)
        cache.width = width
        masks: Any = None
        # Kernels are faster without a mask. A single token needs no mask if all rows begin at the same slot, because it
        # sees every slot that attention reads.
        if num_tokens > 1 or self._single_token_needs_masks or isinstance(starts, Tensor):
            # The keys of layer 0 exist already, because prompts are written to the cache before any pass.
            dtype = cache.buffers[0][0].dtype
            num_copies = self.packing.heads_per_key
            masks = {
                name: cache.causal_mask(window, dtype, num_copies)
                for name, window in self._windows.items()
            }
            # A mask for all layers is passed itself, and masks by layer type as a dictionary.
            masks = masks.get(_SHARED, masks)
        output = self._model(
            input_ids=tokens,
            attention_mask=masks,
            position_ids=clamp_positions(cache.positions, width, self._context),
            **{self._cache_name: cache},
            **self._constant_arguments,
        )
        return chosen_outputs(self._options, output)


def _attention_windows(model: PreTrainedModel) -> dict[str, int | None]:
    """Return the sliding window of each layer type; None for a type without one. If all layers have the same mask, the
    only key is `_SHARED`.

    This follows the way in which `generate` chooses masks for static caches
    (`transformers.masking_utils.create_masks_for_generate`).

    Raises:
        UnsupportedModelError: the model makes its own masks or positions, or has layers of another type.
    """
    config = model.config.get_text_config()
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise UnsupportedModelError("accepts no positions")
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
    """Speeds up models in which several attention heads share keys and values, while a `with` block of this object is
    executed. Such heads are then computed as one head with more queries (*packed*).

    For example, with 8 heads, 2 key heads and 5 tokens, attention computes 20 queries for each of 2 heads, instead of 5
    queries for each of 8 heads. For n tokens, masks must be [1 or B, 1, heads_per_key * n, S].

    Without packing, transformers copies keys and values for each head if there are a mask and several queries. With a
    long context, these copies take longer than attention itself, and no kernel needs them. Outside the block, the model
    is unchanged.

    Attributes:
        heads_per_key: how many heads share their keys; 1 if heads share no keys, or if the model cannot be packed.
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
        # The attributes of each configuration object that names the implementation of attention, by the object's id.
        packed = modules if self.heads_per_key > 1 else []
        self._configs: dict[int, dict[str, Any]] = {
            id(module.config): vars(module.config) for module in packed if hasattr(module, "config")
        }
        ALL_ATTENTION_FUNCTIONS.register(_PACKED, packed_attention)
        ALL_MASK_ATTENTION_FUNCTIONS.register(_PACKED, ALL_MASK_ATTENTION_FUNCTIONS[_PLAIN])

    def __enter__(self) -> None:
        self._set_attention(_PACKED)

    def __exit__(self, *_: object) -> None:
        self._set_attention(_PLAIN)

    def _set_attention(self, name: str) -> None:
        for config in self._configs.values():
            # The attribute's dictionary is changed directly. The property `_attn_implementation` would also change
            # nested configurations, which other models may use, and `setattr` would let huggingface_hub check the
            # value each time.
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
    """Compute attention with queries [B, heads, n, D], and keys and values [B, key heads, S, D]. Returns
    [B, n, heads, D], and None in place of the attention weights.

    Args:
        module: not used; transformers passes the attention module.
        attention_mask: the mask for packed heads; None for a single query, which sees all keys.
    """
    num_rows, num_heads, num_queries, size = query.shape
    packed = query.reshape(num_rows, key.shape[1], -1, size)
    output = scaled_dot_product_attention(
        packed, key, value, attn_mask=attention_mask, scale=scaling
    )
    # In the results of GPU kernels, heads come after queries in memory. So the packed dimension is split first, and
    # heads are joined afterwards.
    output = output.view(num_rows, key.shape[1], -1, num_queries, output.shape[-1])
    output = output.permute(0, 3, 1, 2, 4)
    return output.reshape(num_rows, num_queries, num_heads, -1), None


# The width of a mask is a multiple of this number, which makes 16 bytes in half precision.
_MASK_ALIGNMENT = 8


class StaticRunner(Runner):
    """A `Runner` for a transformers model in evaluation mode, which is completely on the CPU or completely on GPUs. The
    model must accept explicit positions and masks, and must have no state except its KV cache.

    Raises:
        UnsupportedModelError: the model needs a `SnapshotRunner`.
    """

    def __init__(self, model: PreTrainedModel, **options: Unpack[Options]) -> None:
        self._model = model
        self._options = options
        self._device = model.device
        self._forward = SlotForward(model, options)
        # This sets all other attributes (`name`, caches, the pass): a new runner has no slots, like a closed one.
        self.close()

    def close(self) -> None:
        self.name: RunnerName = "static"
        self._cache = SlotCache()
        # For rows of fixed size: their cache, the pass that reads tokens into it, and the widths of this pass in
        # ascending order.
        self._fixed_cache = SlotCache()
        # Never called, because `fix` sets the pass. It frees the pass, and so the cache, that was there before.
        self._pass = Part(self._forward, [self._model])
        self._widths: Sequence[int] = ()

    def start(self, prompts: TokenRows, num_slots: int = 0, *, alone: bool = False) -> Step:
        """Begin a new batch, as `Runner.start` does. Raises UnsupportedModelError if the model fills no KV cache."""
        # Caches have a multiple of `BUCKET` slots (`round_up`), so that a cache serves batches of similar lengths.
        num_slots = num_slots or max(map(len, prompts)) + BUCKET
        if self._fixed_cache.has_room(len(prompts), num_slots):
            self._cache = self._fixed_cache
        elif not self._cache.has_room(len(prompts), num_slots):
            self._cache = SlotCache(len(prompts), round_up(num_slots))
        # Equal prompts are read only once, for example if many answers to one prompt are sampled.
        distinct = list(dict.fromkeys(map(tuple, prompts)))
        # The index in `distinct` of each row's prompt: [0, 1, 0] for the prompts p, q, p.
        sources = [distinct.index(tuple(prompt)) for prompt in prompts]
        # The prompts are read in one group or, with `alone`, in as many groups as there are distinct prompts.
        steps = []
        for group in [[prompt] for prompt in distinct] if alone else [distinct]:
            states, step = self._read_prompts(group)
            # The states of p alone are written to rows 0 and 2. `write` counts its sources from the first of the group:
            # with `alone` that is the group's only prompt, and otherwise the first of all.
            first = distinct.index(group[0])
            rows = [row for row, source in enumerate(sources) if distinct[source] in group]
            self._cache.write(states, rows, sources=[sources[row] - first for row in rows])
            steps.append(step)
        return joined(steps, sources)

    def extend(self, tokens: Tensor, starts: Starts, *, goes_on: bool = False) -> Step:
        with self._forward.packing:
            if isinstance(starts, Tensor):
                # Only `PreparedCalls` and `compile` give a tensor. Their batches are always in the rows of fixed size.
                return Step(*self._fixed_pass(tokens, starts))
            known = [start for start in starts if start is not None]
            longest = max(known)
            # A row that rests begins at the same slot as the longest row.
            first_slots = [longest if start is None else start for start in starts]
            if self._cache is self._fixed_cache:
                outputs = self._extend_fixed(tokens, first_slots)
                if outputs is not None:
                    return Step(*outputs)
                # No prepared pass is wide enough, or too few slots are left. So a pass of just this width is made.
            num_tokens = tokens.shape[1]
            num_seen = longest + num_tokens
            assert self._cache.has_room(len(tokens), num_seen), "more tokens than were said"
            are_equal = min(known) == longest
            if num_tokens > 1 or not are_equal:
                # If a mask's width is not a multiple of `_MASK_ALIGNMENT`, a GPU's kernel copies the mask in every
                # layer. The mask hides the slots that are added here.
                num_seen = round_up(num_seen, _MASK_ALIGNMENT)
            first = longest if are_equal else to_device(first_slots, self._device)
            return Step(*self._forward(self._cache, num_seen, tokens, first))

    def _fixed_pass(self, tokens: Tensor, starts: Tensor) -> Sequence[Tensor]:
        """Extend all rows of fixed size by tokens [B, n], from the slots `starts` [B] on. This is a function of tensors
        only.
        """
        assert self._cache is self._fixed_cache, "the batch has other slots than were prepared"
        # The pass is a part of its own: `compiled.end_part` ends the part before it, and then the pass. So it has the
        # same code, and gives the same numbers, within a larger call and by itself.
        end_part()
        outputs: Sequence[Tensor] = self._pass(tokens, starts)
        end_part()
        return outputs

    def _extend_fixed(self, tokens: Tensor, first_slots: Sequence[int]) -> Sequence[Tensor] | None:
        """Extend the rows of the batch by a pass over all rows of fixed size. The tokens are padded to the next larger
        width of this pass. Returns the outputs for the rows and tokens of the batch; None if there are more tokens than
        the largest width, or if the cache has no room for the pass.
        """
        num_rows, num_tokens = tokens.shape
        cache = self._fixed_cache
        width = next((width for width in self._widths if width >= num_tokens), None)
        if width is None or max(first_slots) + width > cache.num_slots:
            return None
        # Rows that only fill the batch up write from slot 0 on. Their entries are never read.
        num_missing = cache.num_rows - num_rows
        filled = pad(tokens, (0, width - num_tokens, 0, num_missing))
        starts = to_device([*first_slots, *[0] * num_missing], self._device)
        return [output[:num_rows, :num_tokens] for output in self._fixed_pass(filled, starts)]

    def check(self, num_slots: int = ANY_LENGTH) -> None:
        """Compare the runner's outputs with those of plain passes of the model (`check_runner`). This starts a new
        batch.

        Args:
            num_slots: the largest number of tokens in a row.

        Raises:
            UnsupportedModelError: the outputs differ by more than rounding, or the model fails with the runner's masks.
        """
        # The widths of masks are rounded up, so windows that are a little longer than a row are tested too.
        check_runner(self, self._model, self._options, num_slots=num_slots + _MASK_ALIGNMENT)
        # The cache of the check may have more rows than the run's batches, so it is freed.
        self._cache = SlotCache()

    def fix(self, batch_size: int, num_slots: int, widths: Sequence[int]) -> None:
        """Allocate rows of fixed size. Every later batch that fits into them uses them.

        From then on, a pass whose starts are numbers instead of a tensor also runs over these rows, if one of the
        widths is large enough. So reading a text gives the same numbers as decoding it.

        Args:
            batch_size: the largest number of rows in a batch.
            num_slots: the number of slots of each row.
            widths: the widths of the passes, in tokens.

        Raises:
            UnsupportedModelError: the model's passes read values on the host (8-bit weights).
        """
        if getattr(self._model, "is_loaded_in_8bit", False):
            raise UnsupportedModelError(
                "is held in 8 bit: which of its columns are outliers is decided on the host"
            )
        # Reading any token shows the shapes of each layer's keys and values.
        states, _ = self._read_prompts([[0]])
        cache = SlotCache(batch_size, round_up(num_slots))
        # This allocates the buffers, which are never moved again.
        cache.write(states, [0], [0])
        self._fixed_cache = self._cache = cache
        self._pass = Part(functools.partial(self._forward, cache, cache.num_slots), [self._model])
        self._widths = sorted(set(widths))

    def compile(self) -> None:
        """Compile the passes over rows of fixed size, and compare their outputs with those of plain passes of the
        model. `fix` must have been called before.

        Raises:
            UnsupportedModelError: the model cannot be compiled, or its outputs then differ by more than rounding. After
                this, the runner has no rows of fixed size.
        """
        starts = torch.zeros(self._fixed_cache.num_rows, dtype=torch.long, device=self._device)
        try:
            with compiling():
                for width in self._widths:
                    # `Part` compiles the pass when it is called. The tokens, here zeros, do not matter.
                    self.extend(starts.unsqueeze(1).repeat(1, width), starts)
            self.name = "compiled"
            # Short rows are enough for this check. Compiled passes read all slots, so a model that counts from the end
            # of the cache gives wrong outputs at any length.
            num_rows = min(2, self._fixed_cache.num_rows)
            check_runner(self, self._model, self._options, num_rows, num_slots=0)
        except UnsupportedModelError:
            self.close()
            raise

    def _read_prompts(self, prompts: TokenRows) -> tuple[KeysAndValues, Step]:
        """Run the model over prompts. Returns the keys and values of each layer, and the step.

        Raises:
            UnsupportedModelError: the model does not keep its state in a KV cache.
        """
        # The cache is made without the model's configuration. With it, layers would drop entries from before their
        # sliding window, which may be needed after a roll-back.
        cache: Any = DynamicCache()
        lengths = list(map(len, prompts))
        # Prompts are padded on the right, so that no token of a prompt sees padding. So the model's own positions and
        # masks are right.
        tokens = to_device(padded(prompts, least=1), self._device)
        last_tokens = to_device(lengths, self._device) - 1
        arguments: dict[str, Any] = {
            cache_name(self._model): cache,
            **hidden_arguments(self._options),
        }
        with logits_after(self._model, last_tokens):
            output = self._model(input_ids=tokens, use_cache=True, **arguments)
        logits, *hidden = chosen_outputs(self._options, output)
        # If the output matrix cannot be hooked (`logits_after`), the model computes logits after all tokens.
        outputs = [gather_rows(logits, last_tokens) if logits.shape[1] > 1 else logits[:, 0]]
        for of_rows in hidden:
            rows = [row[:length] for row, length in zip(of_rows, lengths, strict=True)]
            outputs.append(pad_sequence(rows, batch_first=True, padding_side="left"))
        lengths_read = {layer.get_seq_length() for layer in cache.layers}
        if lengths_read != {max(1, *lengths)}:
            raise UnsupportedModelError("does not keep its state in a KV cache")
        states = {index: (layer.keys, layer.values) for index, layer in enumerate(cache.layers)}
        return states, Step(*outputs)
