"""Heads that are not trained yet, and heads as files: what `distill` begins with and what it leaves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from harness.config.errors import SettingError
from harness.config.settings import ModelSettings
from harness.drafting.blocks import Head
from harness.drafting.head_formats import StoredHead
from harness.drafting.heads import HeadCheckpoint
from harness.menu.head_kind import HeadKind
from harness.models.checkpoints import Checkpoint


def new_head(settings: ModelSettings, target: Checkpoint, kind: HeadKind) -> HeadCheckpoint:
    """A head for a target, without weights. Raises SettingError for a kind that is not trained from nothing."""
    if not kind.trains:
        raise SettingError("draft", "is a kind of head that distill does not train", settings.name)
    text = target.config.get_text_config(decoder=True)
    is_local = Path(target.settings.repository).is_dir()
    verifier = target.settings.name if is_local else target.settings.repository
    raw, shapes = kind.new(text, verifier)
    config = kind.config(StoredHead(settings, target, raw), shapes)
    return HeadCheckpoint(kind, settings, config, raw=raw)


def initialise(head: Head, target: PreTrainedModel) -> None:
    """Set the weights to train from: an output matrix is the target's own."""
    output: Any = target.get_output_embeddings()
    for name, parameter in head.named_parameters():
        if parameter.shape == output.weight.shape:
            parameter.data.copy_(output.weight.data)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
        elif parameter.dim() == 1:
            nn.init.ones_(parameter)
        else:
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    head.initialise()


def save_head(checkpoint: HeadCheckpoint, head: Head, directory: Path, dtype: torch.dtype) -> None:
    """Write configuration and weights in the format that they were in, which `draft=` takes."""
    raw = checkpoint.raw
    state: dict[str, Tensor] = {
        name: tensor.detach().to("cpu", dtype if tensor.is_floating_point() else None).contiguous()
        for name, tensor in head.state_dict().items()
    }
    if head.d2t is not None:
        known = torch.zeros(head.config.vocabulary_size, dtype=torch.bool)
        known[state["d2t"] + torch.arange(len(state["d2t"]))] = True
        state["t2d"] = known
    if "eagle" in str(raw.get("architectures")).lower() and "speculators_model_type" not in raw:
        state = {
            name.replace("layers.0.", "midlayer."): tensor for name, tensor in state.items()
        }  # SafeAILab's
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
    save_file(state, directory / checkpoint.kind.saved_as, metadata={"format": "pt"})
