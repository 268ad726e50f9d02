"""Files of a repository that may hold a draft head: its configuration, and its tensors by name."""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from torch import Tensor
from transformers.utils.hub import cached_file

from harness.config.errors import RunError, SettingError
from harness.config.failures import explained
from harness.config.settings import ModelSettings
from harness.local.drafting.head_kind import HeadKind
from harness.local.drafting.heads.block_formats import ASSISTANT_NAMES, as_stored_by_z_lab
from harness.local.models.checkpoints import check_model_access

_INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")

# Parts of the names of tensors that no head needs: t2d, [target vocabulary] bool, says which of the
# target's tokens the draft has, as d2t does too (see `blocks.Head`); the verifier's are copies of
# the target's tensors for training; rotary_emb follows from the configuration.
_UNUSED = ("t2d", "verifier_lm_head", "verifier_norm", "rotary_emb")
_OURS = {theirs: ours for ours, theirs in ASSISTANT_NAMES.items()}


def fetch(settings: ModelSettings, name: str) -> Path | None:
    """Return a file of the repository, downloaded if need be; None if it has no such file."""
    path = cached_file(
        settings.repository,
        name,
        revision=settings.revision,
        _raise_exceptions_for_missing_entries=False,
    )
    return None if path is None else Path(path)


def read_configuration(settings: ModelSettings) -> dict[str, Any]:
    """Return the contents of the repository's config.json; {} if there is none, or none within
    reach.

    Then the draft is no head, and `read_checkpoint` says why it is no model either.
    """
    try:
        check_model_access(settings)
        path = fetch(settings, "config.json")
        content = {} if path is None else json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            return {}
        is_of_transformers = content.get("model_type") == "muse_glimmer_assistant"
        return as_stored_by_z_lab(content) if is_of_transformers else content
    except Exception:
        return {}


def find_weights(settings: ModelSettings, kind: HeadKind) -> tuple[Path, ...]:
    """Return the files with the tensors of a head of this kind.

    Raises:
        SettingError: the repository has none of the files that the kind can have.
        RunError: a file that cannot be fetched or read.
    """
    try:
        for name in _INDICES:
            index = fetch(settings, name)
            if index is None:
                continue
            shards: list[Path] = []
            for shard in sorted(set(read_weight_map(settings, "draft", index).values())):
                path = fetch(settings, shard)
                if path is None:
                    rule = f"lacks {shard}, which {index.name} names"
                    raise SettingError("draft", rule, settings.name)
                shards.append(path)
            return tuple(shards)
        for name in kind.weight_files:
            if (path := fetch(settings, name)) is not None:
                return (path,)
    except Exception as exception:
        raise explained(exception, "draft", settings) from exception
    raise SettingError("draft", f"holds no weights ({', '.join(kind.weight_files)})", settings.name)


def read_weight_map(settings: ModelSettings, role: str, index: Path) -> dict[str, str]:
    """Return the file of each tensor, by an index.

    Args:
        role: `draft` or `model`, for the message.

    Raises:
        RunError: for an index that is damaged.
    """
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        is_whole = isinstance(weight_map, dict)
        is_whole = is_whole and all(isinstance(file, str) for file in weight_map.values())
    except (ValueError, KeyError, TypeError, RecursionError):
        is_whole = False
    if not is_whole:
        raise RunError(f"{role}: {index.name} of {settings.repository} is damaged")
    return weight_map


def read_tensors(
    settings: ModelSettings, files: Sequence[Path], device: Literal["cpu", "meta"]
) -> dict[str, Tensor]:
    """Return the tensors that a head's modules need, under the modules' names.

    On the meta device they have shapes, and tell whether they hold floating-point numbers, but no
    memory.
    """
    state: dict[str, Tensor] = {}
    for file in files:
        where = f"draft: {file.name} of {settings.repository}"
        try:
            if file.suffix == ".safetensors":
                state |= _read_safetensors(file, device)
                continue
            loaded = torch.load(file, map_location=device, weights_only=True)
        except pickle.UnpicklingError as error:
            raise RunError(f"{where} is damaged or holds more than tensors") from error
        except Exception as exception:
            raise explained(exception, "draft", settings) from exception
        are_tensors_by_name = isinstance(loaded, dict) and all(
            isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in loaded.items()
        )
        if not are_tensors_by_name:
            raise RunError(f"{where} holds no tensors by name")
        state |= loaded
    used: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if not any(unused in name for unused in _UNUSED):
            # SafeAILab's EAGLE-3 calls its only layer `midlayer`; early heads of SpecForge have what
            # corrects their logits below `logit_head`.
            ours = name.replace("midlayer.", "layers.0.").removeprefix("logit_head.")
            used[_OURS.get(ours, ours)] = tensor
    return used


def _read_safetensors(file: Path, device: str) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {}
    with safe_open(file, framework="pt") as stored:
        for name in stored.keys():  # noqa: SIM118
            part = stored.get_slice(name)
            if device == "meta":
                is_floating_point = part.get_dtype().startswith(("F", "BF"))
                dtype = torch.float32 if is_floating_point else torch.long
                state[name] = torch.empty(part.get_shape(), dtype=dtype, device="meta")
            else:
                state[name] = part[:]
    return state
