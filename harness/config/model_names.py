"""Names of models: their suffixes (`7B_8bit_4GPUs`), which models are draft heads, and names for models of servers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

# Keys that only the configuration of a draft head has.
_HEAD_KEYS = {
    "speculators_model_type",
    "target_layer_ids",
    "dflash_config",
    "medusa_num_heads",
    "draft_vocab_size",
}

# The model of a run that asks a server for whatever model it serves, and has no tokenizer for it.
SERVED = "served"
# The draft of a run that compares two commands, whatever drafts there.
SECOND_COMMAND = "second command"

_SUFFIX = re.compile(r"_(?:(?P<bits>[48]bit)|(?P<gpus>\d{1,9})GPUs?)$")


class NameParts(NamedTuple):
    """A model's name without its suffixes, and what the suffixes say; None for a missing suffix."""

    base: str
    quantization: str | None
    num_gpus: int | None


def split_suffixes(name: str) -> NameParts:
    """Divide a model's name: `7B_8bit_4GPUs` -> (`7B`, `8bit`, 4). Paths have no suffixes."""
    if "/" in name:
        return NameParts(name, quantization=None, num_gpus=None)
    bits: str | None = None
    gpus: str | None = None
    # From the right. A suffix must leave some name before it: `_8bit` alone is a name.
    while (match := _SUFFIX.search(name)) and match.start():
        name = name[: match.start()]
        # Of two suffixes of the same kind, the last counts.
        bits = bits or match["bits"]
        gpus = gpus or match["gpus"]
    return NameParts(name, quantization=bits, num_gpus=int(gpus) if gpus else None)


def without_suffixes(name: str) -> str:
    """Return a name without its suffixes: `7B_8bit_4GPUs` -> `7B`. Paths stay as they are."""
    return split_suffixes(name).base


def canonical_name(name: str, quantization: str | None = None) -> str:
    """Return a model's name with its suffixes in a fixed order: `7B_4GPUs_8bit` -> `7B_8bit_4GPUs`.

    A quantization that was set apart from the name is added as a suffix: (`7B`, `8bit`) -> `7B_8bit`. The name of a
    quantized repository already says so: `org/model-4bit` stays.
    """
    name, bits, gpus = split_suffixes(name)
    if bits is None and quantization in ("8bit", "4bit") and not name.endswith(quantization):
        bits = quantization
    if bits is not None:
        name += f"_{bits}"
    if gpus is not None:
        name += f"_{gpus}GPUs"
    return name


def is_head(repository: str, architecture: Mapping[str, Any] | None) -> bool:
    """Return whether a repository holds a draft head, as far as a preset's architecture or a local directory shows."""
    if architecture is not None:
        return not _HEAD_KEYS.isdisjoint(architecture)
    try:
        stored = json.loads((Path(repository) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(stored, dict) and not _HEAD_KEYS.isdisjoint(stored)
