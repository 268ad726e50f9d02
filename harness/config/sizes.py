"""Where this package and its presets are, and the sizes of the models that these describe, without loading anything."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import yaml

PACKAGE = Path(__file__).resolve().parents[1]
# A wheel has conf/ inside the package, a checkout next to it.
CONF = PACKAGE / "conf" if (PACKAGE / "conf").is_dir() else PACKAGE.parent / "conf"


def least_parameters(model: str) -> float | None:
    """Weights that a token of a preset's model reads, at least: `Qwen/Qwen3-8B-FP8`; None for a model that no preset
    has, with experts, or of another layout than Llama's and Qwen's.
    """
    name = _letters(model.rpartition("/")[2])
    # Another size behind the name is that of a pruned model: `Qwen3-8B-pruned-3B`.
    known = [
        one
        for one in _sizes()
        if name.startswith(one) and not re.search(r"\db(?!it)", name.removeprefix(one))
    ]
    return _sizes()[max(known, key=len)] if known else None


@functools.cache
def _sizes() -> dict[str, float]:
    """Parameters by the letters of each name that a preset's model has."""
    sizes = {}
    for file in (CONF / "model").glob("*.yaml"):
        preset = yaml.safe_load(file.read_text(encoding="utf-8"))
        shape = preset.get("architecture") or {}
        if shape.get("model_type") not in ("llama", "qwen3"):
            continue
        width = shape["hidden_size"]
        heads = shape["num_attention_heads"]
        per_head = shape.get("head_dim") or width // heads
        attention = 2 * width * per_head * (heads + shape.get("num_key_value_heads", heads))
        layer = attention + 3 * width * shape["intermediate_size"]
        size = shape["num_hidden_layers"] * layer + width * shape["vocab_size"]
        for known in (file.stem, str(preset.get("repository")).rpartition("/")[2]):
            sizes[_letters(known)] = size
    return sizes


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
