"""Names of models: suffixes (`7B_8bit_4GPUs`), names that stand for models of servers, and how a draft head is
recognised that was given as the target. (Drafts are recognised in `local/drafting/heads/checkpoint.py`.)
"""

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

# The name of the model if a run measures whatever model a server serves. Such a run has no tokenizer.
SERVED = "served"
# The name of the draft if a run compares two commands, whether or not the second command's server drafts.
SECOND_COMMAND = "second command"

_SUFFIX = re.compile(r"_(?:(?P<bits>[48]bit)|(?P<gpus>\d{1,9})GPUs?)$")


class NameParts(NamedTuple):
    """A model's name without its suffixes, and the values of the suffixes; None for a suffix that is missing."""

    base: str
    quantization: str | None
    num_gpus: int | None


def split_suffixes(name: str) -> NameParts:
    """Divide a model's name: `7B_8bit_4GPUs` -> (`7B`, `8bit`, 4). Paths have no suffixes."""
    if "/" in name:
        return NameParts(name, quantization=None, num_gpus=None)
    bits: str | None = None
    gpus: str | None = None
    # Remove suffixes from the right, as long as a name remains: `_8bit` by itself is a name.
    while (match := _SUFFIX.search(name)) and match.start():
        name = name[: match.start()]
        # If there are two suffixes of one kind, the last one is used.
        bits = bits or match["bits"]
        gpus = gpus or match["gpus"]
    return NameParts(name, quantization=bits, num_gpus=int(gpus) if gpus else None)


def without_suffixes(name: str) -> str:
    """Return a name without its suffixes: `7B_8bit_4GPUs` -> `7B`. Paths stay as they are."""
    return split_suffixes(name).base


def canonical_name(name: str, quantization: str | None = None) -> str:
    """Return a model's name with its suffixes in a fixed order: `7B_4GPUs_8bit` -> `7B_8bit_4GPUs`.

    Args:
        quantization: the value of the setting `quantization`, which is added as a suffix: (`7B`, `8bit`) -> `7B_8bit`.
            It is not added if the name has such a suffix or ends in it, as `org/model-4bit` does.
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
    """Return whether a repository contains a draft head, which cannot be a run's target.

    This is judged by the architecture of a preset or, without one, by the `config.json` in a local directory. False if
    neither is known, as for a repository on the hub that no preset names, `org/model`.
    """
    if architecture is not None:
        return not _HEAD_KEYS.isdisjoint(architecture)
    try:
        stored = json.loads((Path(repository) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(stored, dict) and not _HEAD_KEYS.isdisjoint(stored)
