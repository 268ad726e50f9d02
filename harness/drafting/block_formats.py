"""How heads that draft blocks (DFlash and the kinds made of it) are stored.

| | speculators | z-lab | DeepSpec |
| --- | --- | --- | --- |
| known by | `speculators_model_type` | `dflash_config` | neither of them |
| settings of the block | beside the layers | in `dflash_config` or beside the layers | beside the layers |
| first prediction follows | a mask; the anchor in DSpark | a mask | the anchor |
| a sliding window counts from | the block's first query | each query | there is none |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from harness.drafting.head_formats import Shapes, StoredHead


@dataclass(frozen=True)
class LeftOut:
    """The values of settings that a configuration in speculators' format leaves out.

    Attributes:
        markov_rank: 0 for no Markov head.
        from_anchor: whether the anchor predicts a token too, and there is a confidence head.
        causal_windows: whether queries of layers with a sliding window see only those before them.
    """

    markov_rank: int = 0
    from_anchor: bool = False
    causal_windows: bool = True


def is_speculators(raw: Mapping[str, Any]) -> bool:
    """Whether a configuration is in the format of speculators."""
    return "speculators_model_type" in raw


def is_deepspec(raw: Mapping[str, Any]) -> bool:
    """Whether a configuration is of a head that drafts blocks, in DeepSpec's format."""
    is_flat = not is_speculators(raw) and "dflash_config" not in raw
    return is_flat and "target_layer_ids" in raw and "block_size" in raw


def has_selector(raw: Mapping[str, Any]) -> bool:
    """Whether a configuration in z-lab's format is of a DFlash 2 head."""
    return "selector_rank" in _nested(raw)


def has_causal_head(raw: Mapping[str, Any]) -> bool:
    """Whether a configuration in z-lab's format is of a JetSpec head."""
    return bool(_nested(raw).get("causal_head"))


def block_fields(stored: StoredHead, shapes: Shapes | None, left_out: LeftOut) -> dict[str, Any]:
    """Return the fields of a `BlockConfig`.

    Raises:
        SettingError: for a head that is not drafted with here.
    """
    raw = stored.raw
    stores_matrices = "target_layer_ids" in raw
    layers = stored.layered(shapes, ["embed_tokens", "lm_head"] if stores_matrices else [])
    _settle_windows(stored, layers["transformer"])
    nested = _nested(raw)
    size = raw.get("block_size") or nested.get("block_size")
    if not isinstance(size, int) or size < 2:
        raise stored.refused(f"names no block_size above 1 ({size})")
    mask = raw.get("mask_token_id", nested.get("mask_token_id"))
    block = {
        "block_size": size,
        "mask_token_id": stored.token("mask_token_id", mask),
        "from_anchor": _predicts_from_anchor(raw, left_out),
    }
    return layers | block | _attention(raw, left_out) | _extra_heads(stored, left_out)


def _nested(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a configuration in z-lab's format that describes the head; {} in the others."""
    nested = raw.get("dflash_config")
    return nested if isinstance(nested, Mapping) else {}


def _predicts_from_anchor(raw: Mapping[str, Any], left_out: LeftOut) -> bool:
    usual = not _nested(raw)
    if is_speculators(raw):
        usual = left_out.from_anchor
    return bool(raw.get("sample_from_anchor", usual))


def _attention(raw: Mapping[str, Any], left_out: LeftOut) -> dict[str, bool]:
    """The fields that say which queries and keys see each other, as in the format's own code."""
    if is_speculators(raw):
        non_causal = raw.get("sliding_window_non_causal", not left_out.causal_windows)
        return {"causal_windows": not non_causal}
    if "dflash_config" not in raw:
        return {}
    nested = _nested(raw)
    causal = raw.get("is_causal")
    for key in ("causal", "causal_head"):
        if causal is None:
            causal = nested.get(key)
    return {
        "causal": bool(causal),
        "causal_windows": causal is None,
        "windows_follow": True,
    }


def _extra_heads(stored: StoredHead, left_out: LeftOut) -> dict[str, Any]:
    """The fields of DSpark's Markov head and of its confidence head."""
    raw = stored.raw
    rank = 0
    if "dflash_config" not in raw:
        rank = raw.get("markov_rank", left_out.markov_rank)
    kind = raw.get("markov_head_type", "vanilla")
    if rank and kind != "vanilla":
        raise stored.refused(f"has a Markov head of type {kind}; vanilla is supported")
    usually_confident = is_speculators(raw) and left_out.from_anchor
    is_confident = bool(raw.get("enable_confidence_head", usually_confident))
    reads_token = bool(raw.get("confidence_head_with_markov", True))
    return {
        "markov_rank": rank,
        "confidence": is_confident,
        "confidence_markov": is_confident and reads_token and rank > 0,
    }


def _settle_windows(stored: StoredHead, transformer: Any) -> None:
    """Read the windows of attention that transformers does not know; raise a SettingError for what
    is not drafted here.

    z-lab's format may name the window beside the layers (`swa_window_size`, MiMo's heads), because
    transformers forgets Qwen3's own. DeepSpec trains all layers of its heads without windows.
    """
    raw = stored.raw
    nested = _nested(raw)
    if raw.get("attention_sink_bias") or nested.get("attention_sink_bias"):
        raise stored.refused("has attention sinks (attention_sink_bias), which are not supported")
    layer_types = getattr(transformer, "layer_types", None) or []
    has_windows = any(kind.startswith("sliding") for kind in layer_types)
    if nested.get("use_swa") and not has_windows:
        raise stored.refused("has use_swa=true, and no sliding_attention among its layer_types")
    if has_windows and "target_layer_ids" in raw and not nested:
        raise stored.refused("has sliding windows, which heads of DeepSpec's format do not have")
    if has_windows and transformer.sliding_window is None:
        transformer.sliding_window = nested.get("swa_window_size")
