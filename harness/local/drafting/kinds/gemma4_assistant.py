"""Gemma 4 assistants (Google 2026): a small Gemma 4 whose layers have queries alone.

Every layer attends to the keys and values of the target's own last layer of its type, full or
sliding, so that the assistant reads no text and has no cache. A token is drafted from the target's
embedding of the token before it, beside a state: first the target's last one, then what the
assistant's own is projected back to. All tokens of a proposal are drafted at one position. Say the
text is `a b c`, and the target has read `a b`:

    state of b, embedding of c                 at the position of c, seeing a b    predicts d
    projected state of that, embedding of d    at the position of c, seeing a b    predicts e

As in transformers, a sliding layer sees one token more than its window has. Small assistants group
their vocabulary around centroids: all tokens outside the few groups of a step have one logit, the
least one inside minus 1.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, MODEL_MAPPING, AutoConfig, PreTrainedConfig

from harness.config.errors import SettingError
from harness.config.failures import first_line
from harness.local.drafting.head_kind import HeadKind
from harness.local.drafting.heads.blocks import Head, HeadConfig
from harness.local.drafting.heads.drafter import Draft, HeadDrafter, PreparedDrafts, stacked
from harness.local.drafting.heads.formats import Shapes, StoredHead
from harness.local.drafting.heads.unread import Unread
from harness.local.models.sketch import LayerCache
from harness.local.models.tokenizers import vocabulary_size
from harness.local.runners.regions import end_part

_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
_EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True, kw_only=True)
class AssistantConfig(HeadConfig):
    """An assistant.

    Attributes:
        transformer: None, because the layers cache nothing.
        layer_types: of its layers, in the order of `cached_layers`.
        text: the configuration of its layers.
        num_centroids: 0 without centroids.
        num_chosen: the number of centroids whose tokens a step can draft.
    """

    layer_types: tuple[str, ...]
    text: PreTrainedConfig
    num_centroids: int = 0
    num_chosen: int = 0

    @property
    def borrowed_outputs(self) -> int:
        return 0

    @property
    def borrowed_caches(self) -> tuple[LayerCache, ...]:
        caches = []
        for layer, kind in enumerate(self.text.layer_types):
            num_heads, size = _key_sizes(self.text, layer)
            window = self.text.sliding_window + 1 if kind == "sliding_attention" else None
            caches.append(LayerCache(numbers_per_token=2 * num_heads * size, window=window))
        return tuple(caches)

    def share_read(self, name: str) -> float:
        is_of_groups = name in (_EMBEDDING, "masked_embedding.token_ordering")
        return self.num_chosen / self.num_centroids if is_of_groups and self.num_centroids else 1.0


class AssistantDrafter(HeadDrafter):
    """Proposes with an assistant, one token after the other."""

    head: AssistantHead

    def draft(self, unread: Unread, uniforms: Tensor) -> Draft:
        last = unread.last()
        tokens = unread.following[last]
        states = unread.features[last].unsqueeze(1)
        # The number of tokens that the target has read, which is the position of the next one.
        positions = (unread.starts + unread.counts).unsqueeze(1)
        context = self._target_states(positions)
        drawn: list[Draft] = []
        for numbers in uniforms.unbind(1):
            end_part()  # equal steps share their compiled code
            inputs = torch.cat([self.embed(tokens.unsqueeze(1)), states], dim=-1)
            logits, states = self.head(inputs, position_ids=positions, **context)
            draft = self.draw(logits[:, 0, : self.vocabulary_size], numbers)
            drawn.append(draft)
            tokens = draft.tokens
        return stacked(drawn)

    def _target_states(self, positions: Tensor) -> dict[str, dict[str, Any]]:
        """Return the target's keys and values, and masks of what is seen from positions [B, 1], by
        type of layer.
        """
        cached = self.cached()
        first = cached.first_slots
        if isinstance(first, Tensor):
            first = first.to(self.device)
        num_rows = len(positions)
        shared = {}
        masks = {}
        for kind, states in zip(self.head.config.layer_types, cached.layers, strict=True):
            # All places of one text have its only row.
            keys, values = (
                state.to(self.device).expand(num_rows, -1, -1, -1)
                if len(state) == 1
                else state[:num_rows].to(self.device)
                for state in states
            )
            shared[kind] = keys, values
            slots = torch.arange(keys.shape[2], device=self.device)
            # A row that only fills a batch up has position 0, and must see something.
            last = first + positions.clamp(min=1) - 1
            seen = (slots >= first) & (slots <= last)
            if kind == "sliding_attention":
                seen = seen & (slots >= last - self.head.config.text.sliding_window)
            mask = torch.zeros(seen.shape, dtype=keys.dtype, device=self.device)
            mask = mask.masked_fill(~seen, torch.finfo(keys.dtype).min)
            masks[kind] = mask[:, None, None]
        return {"shared_kv_states": shared, "attention_mask": masks}

    def _run(
        self, call: Any, number: int, inputs: Any, prepared: PreparedDrafts | None
    ) -> tuple[Any, ...]:
        # Prepared calls read the memory that the target's runner had prepared for.
        if prepared is not None and not self.cached().is_fixed:
            prepared = None
        return super()._run(call, number, inputs, prepared)


class AssistantHead(Head):
    """The weights of an assistant."""

    drafter_class = AssistantDrafter

    def __init__(self, config: AssistantConfig) -> None:
        text = config.text
        width = text.hidden_size
        super().__init__(config, width)
        model_class: Any = MODEL_MAPPING[type(text)]
        self.model = model_class(_queries_only(text))
        # As the output matrix: a token's own embedding is the target's. Unlike transformers' it
        # has no buffer, which no checkpoint would fill.
        self.model.embed_tokens = nn.Embedding(config.vocabulary_size, width)
        with torch.device("cpu"):
            self.model.rotary_emb = type(self.model.rotary_emb)(text)
        self.pre_projection = nn.Linear(2 * config.target_size, width, bias=False)
        self.post_projection = nn.Linear(width, config.target_size, bias=False)
        if config.num_centroids:
            self.masked_embedding = nn.Module()
            self.masked_embedding.centroids = nn.Linear(width, config.num_centroids, bias=False)
            ordering = torch.zeros(config.vocabulary_size, dtype=torch.long)
            self.masked_embedding.register_buffer("token_ordering", ordering)

    def forward(self, inputs: Tensor, **context: Any) -> tuple[Tensor, Tensor]:
        """Pass embeddings beside states [B, 1, 2 D] -> logits [B, 1, V], and the states [B, 1, D]
        that the next tokens follow.

        Args:
            context: `position_ids`, `shared_kv_states` and `attention_mask` of the layers.
        """
        embedded = self.pre_projection(inputs)
        output = self.model(inputs_embeds=embedded, use_cache=False, **context)
        states = output.last_hidden_state
        return self.logits(states), self.post_projection(states)

    def logits(self, states: Tensor) -> Tensor:
        """Return logits [..., V] after states [..., width].

        transformers takes the least logit of the whole batch: a row's distribution would depend on
        the others.
        """
        matrix = self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight
        if not self.config.num_centroids:
            return nn.functional.linear(states, matrix)
        groups: Any = self.masked_embedding
        chosen = groups.centroids(states).topk(self.config.num_chosen).indices
        tokens = groups.token_ordering.view(self.config.num_centroids, -1)[chosen].flatten(-2)
        inside = (matrix[tokens] @ states.unsqueeze(-1)).squeeze(-1)
        outside = inside.amin(-1, keepdim=True) - 1
        return outside.expand(*outside.shape[:-1], len(matrix)).scatter(-1, tokens, inside)


def _queries_only(text: PreTrainedConfig) -> PreTrainedConfig:
    """Return a configuration of which transformers 5.23 builds a model, too: it looks for the
    layers that make keys, and here the target does.
    """
    text = copy.deepcopy(text)
    usual = type(text)
    modes = ["reuse"] * text.num_hidden_layers
    text.__class__ = type(usual.__name__, (usual,), {"kv_sharing_modes": modes})
    return text


class Gemma4Assistant(HeadKind):
    """Assistants, as transformers stores them."""

    name = "gemma4_assistant"
    head_class = AssistantHead
    one_pass = False

    def recognises(self, raw: Mapping[str, Any]) -> bool:
        return raw.get("model_type") in _TYPES

    def config(self, stored: StoredHead, shapes: Shapes | None) -> AssistantConfig:
        target = stored.target.config.get_text_config(decoder=True)
        if not target.model_type.startswith("gemma4"):
            rule = (
                f"reads keys and values of a Gemma 4; {stored.target_name} is {target.model_type}"
            )
            raise stored.refused(rule)
        if stored.layers is not None:
            rule = f"must be null: draft={stored.settings.name} reads the last layer's states"
            raise SettingError("draft.layers", rule, tuple(stored.layers))
        own = _stored_config(stored)
        text = own.text_config
        for what, of_head, of_target in (
            ("hidden size", own.backbone_hidden_size, target.hidden_size),
            ("vocabulary size", text.vocab_size, vocabulary_size(target)),
        ):
            if of_head != of_target:
                rule = f"is an assistant for a model of {what} {of_head}"
                raise stored.refused(f"{rule}; {stored.target_name} has {of_target}")
        num_centroids = own.num_centroids if own.use_ordered_embeddings else 0
        num_chosen = own.centroid_intermediate_top_k
        if num_centroids and (text.vocab_size % num_centroids or num_chosen > num_centroids):
            rule = f"cannot choose {num_chosen} of {num_centroids} equal groups of {text.vocab_size} tokens"
            raise stored.refused(rule)
        types = tuple(sorted(set(text.layer_types)))
        num_own = target.num_hidden_layers - target.num_kv_shared_layers
        cached_layers = []
        for kind in types:
            makers = [layer for layer in range(num_own) if target.layer_types[layer] == kind]
            index = text.layer_types.index(kind)
            if not makers or _key_sizes(text, index) != _key_sizes(target, makers[-1]):
                rule = f"has other keys in its layers of type {kind} than {stored.target_name}"
                raise stored.refused(rule)
            cached_layers.append(makers[-1])
        return AssistantConfig(
            **stored.sizes([target.num_hidden_layers]),
            own_output=not own.tie_word_embeddings,
            cached_layers=tuple(cached_layers),
            layer_types=types,
            text=text,
            num_centroids=num_centroids,
            num_chosen=num_chosen,
        )


def _stored_config(stored: StoredHead) -> Any:
    """Return transformers' configuration of an assistant."""
    kind = stored.raw["model_type"]
    if kind not in CONFIG_MAPPING:
        installed = transformers.__version__
        raise stored.refused(f"is of type {kind}, which transformers {installed} does not know")
    try:
        return AutoConfig.for_model(**stored.raw)
    except Exception as error:  # whatever transformers raises for settings that cannot be
        cause = first_line(error)[:200]
        raise stored.refused(f"has a config.json that transformers refuses: {cause}") from error


def _key_sizes(text: Any, layer: int) -> tuple[int, int]:
    """Return how many heads a layer's keys have, and their width."""
    own = text.per_layer_config[layer]
    return own.num_key_value_heads, own.head_dim


RECORD = Gemma4Assistant()
