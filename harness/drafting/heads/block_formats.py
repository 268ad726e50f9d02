"""How heads that draft blocks (DFlash and the kinds made of it) are stored.

The anchor of a block is its first query, the token just decided; the others are masks
(`kinds/dflash`).

                          speculators                  z-lab                      DeepSpec
    known by              `speculators_model_type`     `dflash_config`            neither of them
    block's settings      beside the layers            there, or beside them      beside the layers
    first token drafted   by a mask (DSpark: anchor)   by a mask                  by the anchor
    sliding window from   the anchor                   each query                 there is none
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from harness.drafting.heads.formats import Shapes, StoredHead


@dataclass(frozen=True)
class LeftOut:
    """The values of settings that a configuration in speculators' format leaves out, for a kind.

    Attributes:
        from_anchor: as in `BlockConfig`.
        causal_windows: as in `BlockConfig`.
    """

    from_anchor: bool = False
    causal_windows: bool = True


def is_speculators(raw: Mapping[str, Any]) -> bool:
    """Return whether a configuration is in the format of speculators."""
    return "speculators_model_type" in raw


def is_deepspec(raw: Mapping[str, Any]) -> bool:
    """Return whether a configuration is of a head that drafts blocks, in DeepSpec's format."""
    is_flat = not is_speculators(raw) and "dflash_config" not in raw
    return is_flat and "target_layer_ids" in raw and "block_size" in raw


def is_spark(raw: Mapping[str, Any]) -> bool:
    """Return whether a configuration in DeepSpec's format is of a DSpark head."""
    return bool(raw.get("markov_rank") or raw.get("enable_confidence_head"))


def has_selector(raw: Mapping[str, Any]) -> bool:
    """Return whether a configuration in z-lab's format is of a DFlash 2 head."""
    return "selector_rank" in _nested(raw)


def has_causal_head(raw: Mapping[str, Any]) -> bool:
    """Return whether a configuration in z-lab's format is of a JetSpec head."""
    return bool(_nested(raw).get("causal_head"))


def block_fields(stored: StoredHead, shapes: Shapes | None, left_out: LeftOut) -> dict[str, Any]:
    """Return the fields of a `BlockConfig`.

    Args:
        shapes: of the stored tensors; None with random weights.

    Raises:
        SettingError: for a head that this project cannot draft with.
    """
    raw = stored.raw
    # DeepSpec stores copies of the target's embedding and output matrix, the others leave them out.
    stores_matrices = "target_layer_ids" in raw
    layers = stored.layered(shapes, ["embed_tokens", "lm_head"] if stores_matrices else [])
    _settle_windows(stored, layers["transformer"])
    nested = _nested(raw)
    size = raw.get("block_size") or nested.get("block_size")
    if not isinstance(size, int) or size < 2:
        raise stored.refused(f"names no block_size above 1 ({size})")
    mask = raw.get("mask_token_id", nested.get("mask_token_id"))
    usually_from_anchor = left_out.from_anchor if is_speculators(raw) else not nested
    block = {
        "block_size": size,
        "mask_token_id": stored.token("mask_token_id", mask),
        "from_anchor": bool(raw.get("sample_from_anchor", usually_from_anchor)),
    }
    return layers | block | _attention(raw, left_out)


def _nested(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a configuration in z-lab's format nests about the head; {} in other formats."""
    nested = raw.get("dflash_config")
    return nested if isinstance(nested, Mapping) else {}


def _attention(raw: Mapping[str, Any], left_out: LeftOut) -> dict[str, bool]:
    """Return the fields that say which queries and keys see each other, as in the format's own
    code.
    """
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


def _settle_windows(stored: StoredHead, transformer: Any) -> None:
    """Set the sliding window of `transformer`, where only the head's own format names it.

    z-lab's format may do that (`swa_window_size`, MiMo's heads), because transformers drops the
    window of a Qwen3 configuration. DeepSpec trains all layers of its heads without windows.

    Raises:
        SettingError: for attention that this project does not have.
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
