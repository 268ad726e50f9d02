"""How heads that draft blocks (DFlash and the kinds made of it) are stored.

The anchor of a block is its first query, the token just decided; the others are masks
(`kinds/dflash`).

transformers' own format is read as z-lab's (`as_stored_by_z_lab`).

                          speculators                  z-lab                      DeepSpec
    known by              `speculators_model_type`     `dflash_config`            neither of them
    block's settings      beside the layers            there, or beside them      beside the layers
    first token drafted   by a mask (DSpark: anchor)   by a mask                  by the anchor
    sliding window from   the anchor                   each query                 there is none
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.local.drafting.heads.formats import Shapes, StoredHead

# Names of tensors in our heads, and in transformers' own DFlash model.
ASSISTANT_NAMES = {
    "fc.weight": "encoder.fc.weight",
    "hidden_norm.weight": "encoder.output_norm_enc.weight",
}


def as_stored_by_z_lab(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration of transformers' own DFlash model in z-lab's format."""
    kept = {key: value for key, value in raw.items() if key != "target_layer_ids"}
    window = raw.get("sliding_window")
    return kept | {
        "model_type": "qwen3",
        "use_sliding_window": True,
        # Theirs is of tokens at each side, z-lab's of those up to a query's own.
        "sliding_window": window + 1 if isinstance(window, int) else None,
        "dflash_config": {
            "target_layer_ids": raw.get("target_layer_ids"),
            "mask_token_id": raw.get("mask_token_id"),
            "causal": False,
        },
    }


def is_speculators(raw: Mapping[str, Any]) -> bool:
    """Return whether a configuration is in the format of speculators."""
    return "speculators_model_type" in raw


def stored_kind(raw: Mapping[str, Any]) -> str | None:
    """Return the kind of a head: the one that speculators' format names, else the one whose
    settings the configuration has; None where it has none of a head that drafts blocks.
    """
    if is_speculators(raw):
        kind = raw["speculators_model_type"]
        # PARD-2 trains a DFlash head otherwise, and stores it alike (speculators' `models/pard2`).
        return "dflash" if kind == "pard2" else kind
    if "dflash_config" in raw:
        nested = _nested(raw)
        if "selector_rank" in nested:
            return "dflash2"
        if nested.get("projector_type") == "domino":
            return "domino"
        return "jetspec" if nested.get("causal_head") else "dflash"
    if "target_layer_ids" in raw and "block_size" in raw:
        is_spark = raw.get("markov_rank") or raw.get("enable_confidence_head")
        return "dspark" if is_spark else "dflash"
    return None


def block_fields(
    stored: StoredHead, shapes: Shapes | None, *, from_anchor: bool, causal_windows: bool
) -> dict[str, Any]:
    """Return the fields of a `BlockConfig`.

    Args:
        shapes: of the stored tensors; None with random weights.
        from_anchor, causal_windows: of `BlockConfig`, where a configuration in speculators' format
            leaves them out.

    Raises:
        SettingError: for a head that this project cannot draft with.
    """
    raw = stored.raw
    # DeepSpec stores copies of the target's embedding and output matrix, the others leave them out.
    stores_matrices = "target_layer_ids" in raw
    layers = stored.layered(shapes, ["embed_tokens", "lm_head"] if stores_matrices else [])
    _settle_windows(raw, layers["transformer"])
    nested = _nested(raw)
    size = raw.get("block_size") or nested.get("block_size")
    if not isinstance(size, int) or size < 2:
        raise stored.refused(f"names no block_size above 1 ({size})")
    mask = stored.value("mask_token_id", nested.get("mask_token_id"))
    if not is_speculators(raw):
        # DeepSpec's heads predict from the anchor, z-lab's do not.
        from_anchor = not nested
    block = {
        "block_size": size,
        "mask_token_id": stored.token("mask_token_id", mask),
        "from_anchor": stored.value("sample_from_anchor", from_anchor),
    }
    # Which queries and keys see each other, as in the format's own code.
    if is_speculators(raw):
        block["causal_windows"] = not stored.value("sliding_window_non_causal", not causal_windows)
    elif "dflash_config" in raw:
        stated = (raw.get("is_causal"), nested.get("causal"), nested.get("causal_head"))
        causal = next((flag for flag in stated if flag is not None), None)
        block["causal"] = bool(causal)
        block["causal_windows"] = causal is None
        block["windows_follow"] = True
    return layers | block


def _nested(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a configuration in z-lab's format nests about the head; {} in other formats."""
    nested = raw.get("dflash_config")
    return nested if isinstance(nested, Mapping) else {}


def _settle_windows(raw: Mapping[str, Any], transformer: Any) -> None:
    """Set the sliding window of `transformer`, where only the head's own format names it.

    z-lab's format may do that (`swa_window_size`, MiMo's heads), because transformers drops the
    window of a Qwen3 configuration.
    """
    layer_types = getattr(transformer, "layer_types", None) or []
    has_windows = any(kind.startswith("sliding") for kind in layer_types)
    if has_windows and transformer.sliding_window is None:
        transformer.sliding_window = _nested(raw).get("swa_window_size")
