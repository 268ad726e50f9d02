"""Names of models: their suffixes, `7B_8bit_4GPUs`, which are of draft heads, and those of what only a server knows."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

# Keys that only a head's configuration has.
_HEAD_KEYS = {
    "speculators_model_type",
    "target_layer_ids",
    "dflash_config",
    "medusa_num_heads",
    "draft_vocab_size",
}

# The model of a run that asks a server for what it serves, and knows no tokenizer of it.
SERVED = "served"
# What drafts in a run that compares two commands, whatever that is.
SECOND_COMMAND = "second command"

_SUFFIX = re.compile(r"_(?:(?P<bits>[48]bit)|(?P<gpus>\d{1,9})GPUs?)$")


class NameParts(NamedTuple):
    """A model's name without its suffixes, and what these say; None for a suffix that it lacks."""

    base: str
    quantization: str | None
    num_gpus: int | None


def split_suffixes(name: str) -> NameParts:
    """`7B_8bit_4GPUs` -> (`7B`, `8bit`, 4). Paths have no suffixes."""
    if "/" in name:
        return NameParts(name, quantization=None, num_gpus=None)
    bits: str | None = None
    gpus: str | None = None
    # From the right. What would leave no name is none of the suffixes: `_8bit` alone is a name.
    while (match := _SUFFIX.search(name)) and match.start():
        name = name[: match.start()]
        # Of two alike the last counts.
        bits = bits or match["bits"]
        gpus = gpus or match["gpus"]
    return NameParts(name, quantization=bits, num_gpus=int(gpus) if gpus else None)


def without_suffixes(name: str) -> str:
    """`7B_8bit_4GPUs` -> `7B`; paths are left alone."""
    return split_suffixes(name).base


def canonical_name(name: str, quantization: str | None = None) -> str:
    """`7B_4GPUs_8bit` -> `7B_8bit_4GPUs`; a quantization that was set apart from the name counts as a suffix: (`7B`,
    `8bit`) -> `7B_8bit`.

    A repository that comes quantized says so in its name already: `org/model-4bit` stays.
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
    """Whether this is the repository of a draft head, as far as a preset's architecture or a local directory shows."""
    if architecture is not None:
        return not _HEAD_KEYS.isdisjoint(architecture)
    try:
        stored = json.loads((Path(repository) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(stored, dict) and not _HEAD_KEYS.isdisjoint(stored)
