"""Reads what the configurations of draft heads have in common.

Writers are speculators, SafeAILab (EAGLE-3), z-lab (DFlash, DFlash 2, JetSpec), DeepSpec (EAGLE-3,
DFlash, DSpark) and Medusa. Each file in `kinds/` recognises its own kind and reads the rest.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from harness.config.errors import SettingError
from harness.config.failures import first_line
from harness.config.settings import ModelSettings
from harness.local.drafting.heads.blocks import LAYER_STYLES
from harness.local.models.checkpoints import Checkpoint
from harness.local.models.tokenizers import vocabulary_size

# The shape of each stored tensor, by its name. Where a function takes it, None stands for a head
# with random weights, of which only the configuration is read.
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class StoredHead:
    """A head's configuration as its writer stored it, and the target that it must match.

    Attributes:
        settings: the draft's, as the user gave them.
        target: the model that the head must match.
        raw: the contents of config.json.
        layers: `draft.layers`, indices into the target's hidden states that override those of the
            configuration; None for these. 0 is the embedding, i what comes out of layer i.
    """

    settings: ModelSettings
    target: Checkpoint
    raw: Mapping[str, Any]
    layers: Sequence[int] | None = None

    def sizes(self, usual_layers: Sequence[int]) -> dict[str, Any]:
        """Return the fields of `HeadConfig` that follow from the target alone.

        Args:
            usual_layers: the hidden states that the head reads unless the user says otherwise.
        """
        text_config = self.target.config.get_text_config(decoder=True)
        layers = tuple(usual_layers if self.layers is None else self.layers)
        for layer in layers:
            if not 0 <= layer <= text_config.num_hidden_layers:
                rule = (
                    f"reads layer {layer}; {self.target_name} has {text_config.num_hidden_layers}"
                )
                raise self.refused(rule)
        vocabulary = vocabulary_size(text_config)
        return {
            "layers": layers,
            "target_size": text_config.hidden_size,
            "vocabulary_size": vocabulary,
            "draft_vocabulary_size": vocabulary,
        }

    def layered(self, shapes: Shapes | None, usually_stored: Collection[str]) -> dict[str, Any]:
        """Return the fields of `HeadConfig` for a head with transformer layers, checked against the
        target.

        Args:
            usually_stored: which of `embed_tokens` and `lm_head` the head's writer stores, for a
                head without `shapes`.
        """
        text_config = self.target.config.get_text_config(decoder=True)
        sizes = self.sizes(self.layer_ids(text_config.num_hidden_layers))
        transformer = self.transformer()
        # Some configurations state the target's number of layers.
        stored_layers = {name.split(".")[1] for name in shapes or () if name.startswith("layers.")}
        if stored_layers:
            transformer.num_hidden_layers = len(stored_layers)
        made_for = self.raw.get("target_hidden_size") or transformer.hidden_size
        for size_name, of_head, of_target in (
            ("hidden size", made_for, text_config.hidden_size),
            ("vocabulary size", transformer.vocab_size, vocabulary_size(text_config)),
            ("number of layers", self.raw.get("num_target_layers"), text_config.num_hidden_layers),
        ):
            if of_head is not None and of_head != of_target:
                rule = f"is a head for a model of {size_name} {of_head}"
                raise self.refused(f"{rule}; {self.target_name} has {of_target}")
        draft_vocabulary = self.raw.get("draft_vocab_size") or transformer.vocab_size
        is_reduced = draft_vocabulary != transformer.vocab_size
        if shapes is None:
            has_embedding = "embed_tokens" in usually_stored
            has_output = "lm_head" in usually_stored or is_reduced
        else:
            has_embedding = "embed_tokens.weight" in shapes
            has_output = "lm_head.weight" in shapes
        other_width = transformer.hidden_size != text_config.hidden_size
        if not has_embedding and other_width:
            raise self.refused("holds no embed_tokens.weight, and the target's does not fit")
        if not has_output and (is_reduced or other_width):
            raise self.refused("holds no lm_head.weight, and the target's does not fit")
        return sizes | {
            "draft_vocabulary_size": draft_vocabulary,
            "own_embedding": has_embedding,
            "own_output": has_output,
            "transformer": transformer,
        }

    def layer_ids(self, num_layers: int) -> list[int]:
        """Return which hidden states the head reads, 0 for the embedding.

        z-lab and DeepSpec count from the output of the first layer instead, which is hidden state
        1.
        """
        raw = self.raw
        nested = raw.get("eagle_config") or {}
        if nested.get("use_aux_hidden_state") is False:
            rule = "reads no hidden states of inner layers (use_aux_hidden_state: false)"
            raise self.refused(f"{rule}, which is not supported")
        for place, key in (
            (raw, "eagle_aux_hidden_state_layer_ids"),
            (raw, "aux_hidden_state_layer_ids"),
            (nested, "eagle_aux_hidden_state_layer_ids"),
        ):
            if place.get(key):
                return list(place[key])
        outputs = (raw.get("dflash_config") or raw).get("target_layer_ids")
        if outputs is not None:
            return [layer + 1 for layer in outputs]
        # What EAGLE-3 reads where its configuration names nothing.
        return [2, num_layers // 2, num_layers - 3]

    def transformer(self) -> PreTrainedConfig:
        """Return the configuration of the head's own layers."""
        nested = self.raw.get("transformer_layer_config")
        raw = nested or self.raw
        # What each format means by a configuration without it.
        style = raw.get("model_type") or ("qwen3" if nested else "llama")
        if style not in LAYER_STYLES:
            supported = ", ".join(sorted(LAYER_STYLES))
            raise self.refused(f"has layers of type {style}; supported are {supported}")
        try:
            size = vocabulary_size(self.target.config)
            return AutoConfig.for_model(**{"vocab_size": size, **raw, "model_type": style})
        except Exception as error:  # whatever transformers raises for settings that cannot be
            cause = first_line(error)[:200]
            rule = f"has a config.json that transformers refuses: {cause}"
            raise self.refused(rule) from error

    def value(self, key: str, default: Any) -> Any:
        """Return a value of the configuration, or a default; null counts as absent."""
        stored = self.raw.get(key)
        return default if stored is None else stored

    def token(self, key: str, token: Any) -> int:
        """Return a token that the configuration names by `key`, once it is known to be one.

        Raises:
            SettingError: if it is not in the target's vocabulary.
        """
        if not isinstance(token, int) or not 0 <= token < vocabulary_size(self.target.config):
            raise self.refused(f"names no {key} in the vocabulary ({token})")
        return token

    @property
    def target_name(self) -> str:
        """The target as the user types it."""
        return f"model={self.target.settings.name}"

    def refused(self, rule: str) -> SettingError:
        """Return the error for a head that breaks a rule."""
        return SettingError("draft", rule, self.settings.name)
