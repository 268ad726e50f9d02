"""From the configurations that writers of draft heads store to typed ones.

The formats of speculators, SafeAILab (EAGLE-3), z-lab (DFlash), DeepSpec (EAGLE-3, DFlash, DSpark) and Medusa are told
apart by their configuration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from harness.config.errors import SettingError
from harness.config.settings import ModelSettings
from harness.drafting.blocks import LAYER_STYLES
from harness.drafting.dflash import BlockConfig
from harness.drafting.eagle import EagleConfig
from harness.drafting.medusa import MedusaConfig
from harness.models.checkpoints import Checkpoint
from harness.models.failures import first_line
from harness.models.tokenizers import vocabulary_size

AnyConfig = EagleConfig | BlockConfig | MedusaConfig

# Bounds of numbers in a head's configuration, far above those of published heads: beyond them a module takes hours to
# build, or drafting all memory. A block may be as long as `decoding.num_draft_tokens`.
_BOUNDS = {
    "block_size": (1, 1024),
    "num_hidden_layers": (1, 1024),
    "medusa_num_heads": (0, 1024),
    "medusa_num_layers": (0, 1024),
    "num_attention_heads": (1, 4096),
    "num_key_value_heads": (1, 4096),
    "head_dim": (1, 65_536),
    "hidden_size": (1, 1 << 20),
    "intermediate_size": (1, 1 << 22),
    "target_hidden_size": (1, 1 << 20),
    "markov_rank": (0, 1 << 20),
    "vocab_size": (1, 1 << 24),
    "draft_vocab_size": (1, 1 << 24),
}
_FLAGS = (
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "enable_confidence_head",
    "confidence_head_with_markov",
    "sample_from_anchor",
    "sliding_window_non_causal",
)
_LAYERS = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids", "target_layer_ids")
_NESTED = ("dflash_config", "eagle_config", "transformer_layer_config")
_WORDS = ("model_type", "markov_head_type")


@dataclass(frozen=True)
class RawHead:
    """A head's configuration as its writer stored it, for a target."""

    settings: ModelSettings
    target: Checkpoint
    raw: Mapping[str, Any]

    def kind(self) -> str | None:
        raw = self.raw
        if (stated := raw.get("speculators_model_type")) is not None:
            if stated not in ("eagle3", "peagle", "dflash", "dspark"):
                raise self.refused(
                    f"is a speculators head of type {stated}, which is not supported"
                )
            return (
                "peagle" if stated == "eagle3" and raw.get("mask_token_id") is not None else stated
            )
        if "dflash_config" in raw:
            return "dflash"
        if "target_layer_ids" in raw and "block_size" in raw:
            return "dspark" if raw.get("markov_rank") else "dflash"
        if "medusa_num_heads" in raw or raw.get("model_type") == "medusa":
            return "medusa"
        names = raw.get("architectures")
        eagle = isinstance(names, list) and any("eagle3" in str(name).lower() for name in names)
        return "eagle3" if eagle or "draft_vocab_size" in raw else None

    def config(
        self, kind: str, found: Mapping[str, tuple[int, ...]] | None, layers: Sequence[int] | None
    ) -> AnyConfig:
        """Checked against the target. `found`: shapes of the stored tensors, None where they are not known."""
        self._check_types(self.raw)
        text = self.target.config.get_text_config(decoder=True)
        common: dict[str, Any] = {
            "target_size": text.hidden_size,
            "vocabulary_size": vocabulary_size(text),
        }
        common["draft_vocabulary_size"] = common["vocabulary_size"]
        usual = (
            [text.num_hidden_layers] if kind == "medusa" else self.layer_ids(text.num_hidden_layers)
        )
        common["layers"] = tuple(usual if layers is None else layers)
        if outside := [
            layer for layer in common["layers"] if not 0 <= layer <= text.num_hidden_layers
        ]:
            raise self.refused(
                f"reads layer {outside[0]}; {self.target_name} has {text.num_hidden_layers}"
            )
        if kind == "medusa":
            return self.medusa(common, found)
        own = self.transformer()
        wanted = self.raw.get("target_hidden_size") or own.hidden_size
        for what, head, size in (
            ("hidden size", wanted, text.hidden_size),
            ("vocabulary size", own.vocab_size, common["vocabulary_size"]),
            ("number of layers", self.raw.get("num_target_layers"), text.num_hidden_layers),
        ):
            if head is not None and head != size:
                raise self.refused(
                    f"is a head for a model of {what} {head}; {self.target_name} has {size}"
                )
        common["draft_vocabulary_size"] = self.raw.get("draft_vocab_size") or own.vocab_size
        reduced = common["draft_vocabulary_size"] != own.vocab_size
        if found is None:
            # What their writers store; DeepSpec's is the only one of flat formats to store all.
            eagle, nested = "eagle" in kind, "transformer_layer_config" in self.raw
            complete = "target_layer_ids" in self.raw
            found_embedding, found_output = (
                complete or (eagle and nested),
                complete or eagle or reduced,
            )
        else:
            found_embedding, found_output = (
                "embed_tokens.weight" in found,
                "lm_head.weight" in found,
            )
        common |= {"own_embedding": found_embedding, "own_output": found_output}
        for name, has in (("embed_tokens", found_embedding), ("lm_head", found_output)):
            if not has and ((reduced and name == "lm_head") or own.hidden_size != text.hidden_size):
                raise self.refused(f"holds no {name}.weight, and the target's does not fit")
        common["transformer"] = own
        return (
            self.eagle(kind, common) if kind in ("eagle3", "peagle") else self.block(kind, common)
        )

    def eagle(self, kind: str, common: dict[str, Any]) -> EagleConfig:
        flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
        mask = (
            self.token("mask_token_id", self.raw.get("mask_token_id")) if kind == "peagle" else None
        )
        common |= {flag: bool(self.raw.get(flag)) for flag in flags}
        return EagleConfig(**common, mask_token_id=mask)

    def block(self, kind: str, common: dict[str, Any]) -> BlockConfig:
        raw, nested = self.raw, self.raw.get("dflash_config") or {}
        size = raw.get("block_size") or nested.get("block_size")
        if not isinstance(size, int) or size < 2:
            raise self.refused(f"names no block_size above 1 ({size})")
        dspark, speculators = kind == "dspark", "speculators_model_type" in raw
        rank = raw.get("markov_rank", 256 if dspark else 0) if "dflash_config" not in raw else 0
        if rank and raw.get("markov_head_type", "vanilla") != "vanilla":
            raise self.refused(
                f"has a Markov head of type {raw['markov_head_type']}; vanilla is supported"
            )
        confidence = bool(raw.get("enable_confidence_head", dspark and speculators))
        return BlockConfig(
            **common,
            block_size=size,
            mask_token_id=self.token(
                "mask_token_id", raw.get("mask_token_id", nested.get("mask_token_id"))
            ),
            # DeepSpec trains DFlash that way too.
            from_anchor=bool(raw.get("sample_from_anchor", dspark if speculators else not nested)),
            causal_windows=speculators and not raw.get("sliding_window_non_causal"),
            markov_rank=rank,
            confidence=confidence,
            confidence_markov=confidence
            and bool(raw.get("confidence_head_with_markov", True))
            and rank > 0,
        )

    def medusa(
        self, common: dict[str, Any], found: Mapping[str, tuple[int, ...]] | None
    ) -> MedusaConfig:
        """Counted in the weights: configurations often state another number of heads."""
        heads, blocks = self.raw.get("medusa_num_heads", 0), self.raw.get("medusa_num_layers", 1)
        own = found is None
        if found is not None:
            heads = len({name.partition(".")[0] for name in found})
            blocks = sum(
                name.startswith("0.") and name.endswith(".linear.weight") for name in found
            )
            own = f"0.{blocks}.weight" in found
        if len(common["layers"]) != 1:
            raise self.refused(f"reads one layer of the target, not {len(common['layers'])}")
        if not heads or not blocks:
            raise self.refused("holds no Medusa heads")
        return MedusaConfig(**common, num_heads=heads, num_blocks=blocks, own_outputs=own)

    def layer_ids(self, num_layers: int) -> list[int]:
        """Which hidden states of the target it reads; z-lab and DeepSpec count layers' outputs, the others inputs."""
        raw = self.raw
        nested = raw.get("eagle_config") or {}
        for place, key in (
            (raw, "eagle_aux_hidden_state_layer_ids"),
            (raw, "aux_hidden_state_layer_ids"),
            (nested, "eagle_aux_hidden_state_layer_ids"),
        ):
            if place.get(key):
                return list(place[key])
        if (outputs := (raw.get("dflash_config") or raw).get("target_layer_ids")) is not None:
            return [layer + 1 for layer in outputs]
        return [2, num_layers // 2, num_layers - 3]

    def transformer(self) -> PreTrainedConfig:
        """The configuration of the head's own layers."""
        raw = self.raw.get("transformer_layer_config") or self.raw
        style = raw.get("model_type", "qwen3" if raw is not self.raw else "llama")
        if style not in LAYER_STYLES:
            raise self.refused(
                f"has layers of type {style}; supported are {', '.join(sorted(LAYER_STYLES))}"
            )
        try:
            return AutoConfig.for_model(**{**raw, "model_type": style})
        except Exception as error:  # whatever transformers raises for settings that cannot be
            raise self.refused(
                f"has a config.json that transformers refuses: {first_line(error)[:200]}"
            ) from error

    def _check_types(self, raw: Mapping[str, Any]) -> None:
        """Raise a SettingError for values of another type or outside their bounds; null counts as absent."""
        for key, value in raw.items():
            rule = None if value is None else _broken_rule(key, value)
            if rule is not None:
                raise self.refused(
                    f"has a config.json with {key}={_shortened(value)}, which {rule}"
                )
            if key in _NESTED and value is not None:
                self._check_types(value)

    def token(self, key: str, token: Any) -> int:
        if not isinstance(token, int) or not 0 <= token < vocabulary_size(self.target.config):
            raise self.refused(f"names no {key} in the vocabulary ({token})")
        return token

    @property
    def target_name(self) -> str:
        return f"model={self.target.settings.name}"

    def refused(self, rule: str) -> SettingError:
        return SettingError("draft", rule, self.settings.name)


def _broken_rule(key: str, value: Any) -> str | None:
    """The rule that a value of a head's configuration breaks; None where it breaks none."""
    if key in _BOUNDS:
        low, high = _BOUNDS[key]
        if type(value) is not int or not low <= value <= high:
            return f"must be an integer from {low} to {high:,}"
    if key in _FLAGS and not isinstance(value, bool):
        return "must be true or false"
    if key in _LAYERS and not (
        isinstance(value, list) and all(type(layer) is int for layer in value)
    ):
        return "must be a list of layers"
    if key in _NESTED and not isinstance(value, dict):
        return "must hold settings by name"
    if key in _WORDS and not isinstance(value, str):
        return "must be text"
    return None


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
