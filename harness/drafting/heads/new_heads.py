"""Heads before and after their training by `distill`: new ones, and ones written to files.

`HeadKind.new` of the kinds with transformer layers calls `speculators_configuration`, and adds what
the kind needs.
"""

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
from harness.drafting.head_kind import HeadKind
from harness.drafting.heads.blocks import Head
from harness.drafting.heads.find import HeadCheckpoint
from harness.drafting.heads.formats import StoredHead
from harness.models.checkpoints import Checkpoint

# Draft tokens of a head that is trained here: Medusa heads, and one less than the queries of a
# DFlash block.
NUM_TOKENS = 4


def speculators_configuration(
    kind: str, style: str, num_layers: int, text_config: Any, verifier: str
) -> tuple[dict[str, Any], list[int]]:
    """Return the contents of a config.json for layers as wide as the target's, and the layers of
    the target that such heads usually read.

    Args:
        kind: speculators' name of the kind, as `eagle3`.
        style: transformers' name for the style of its layers, `llama` or `qwen3`.
        num_layers: how many layers the head has.
        text_config: the target's text configuration.
        verifier: the target's name or repository.
    """
    width = text_config.hidden_size
    heads = text_config.num_attention_heads
    layer = {
        "model_type": style,
        "num_hidden_layers": num_layers,
        "hidden_size": width,
        "intermediate_size": getattr(text_config, "intermediate_size", None) or 4 * width,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(text_config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(text_config, "head_dim", None) or width // heads,
        "hidden_act": "silu",
        "rms_norm_eps": getattr(text_config, "rms_norm_eps", 1e-5),
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": getattr(text_config, "max_position_embeddings", 4096),
        "vocab_size": text_config.vocab_size,
        "tie_word_embeddings": False,
        "attention_bias": False,
    }
    proposal = {"proposal_type": "greedy", "speculative_tokens": NUM_TOKENS}
    raw: dict[str, Any] = {
        "speculators_model_type": kind,
        "draft_vocab_size": text_config.vocab_size,
        "transformer_layer_config": layer,
        "target_hidden_size": width,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {
                "name_or_path": verifier,
                "architectures": text_config.architectures or [],
            },
        },
    }
    depth = text_config.num_hidden_layers
    return raw, [min(2, depth), depth // 2, max(1, depth - 3)]


def new_head(kind: HeadKind, target: Checkpoint) -> HeadCheckpoint:
    """Plan a new head of a kind, `draft=eagle3`, for a target: a checkpoint without files.

    Raises:
        SettingError: for a kind of head that cannot be trained.
    """
    if not kind.trains:
        raise SettingError("draft", "is a kind of head that distill does not train", kind.name)
    text_config = target.config.get_text_config(decoder=True)
    is_local = Path(target.settings.repository).is_dir()
    # The format of speculators calls the target a verifier.
    verifier = target.settings.name if is_local else target.settings.repository
    # The contents of a config.json, and the shapes of the tensors that a stored head would have.
    raw, shapes = kind.new(text_config, verifier)
    settings = ModelSettings(name=kind.name, repository="new")  # a head without files reads none
    config = kind.config(StoredHead(settings, target, raw), shapes)
    return HeadCheckpoint(kind, settings, config, raw=raw)


def initialise(head: Head, target: PreTrainedModel) -> None:
    """Set the weights that training begins with.

    Every matrix with the shape of the target's output matrix begins as a copy of it, embeddings
    too.
    """
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
    """Write a head's configuration and weights, in the format of its checkpoint, which `draft=`
    reads.
    """
    raw = checkpoint.raw
    state: dict[str, Tensor] = {
        name: tensor.detach().to("cpu", dtype if tensor.is_floating_point() else None).contiguous()
        for name, tensor in head.state_dict().items()
    }
    if head.d2t is not None:
        # Other engines also want t2d, which says of each of the target's tokens whether the draft
        # has it; d2t is explained in `blocks.Head`.
        offsets = state["d2t"]
        known = torch.zeros(head.config.vocabulary_size, dtype=torch.bool)
        known[offsets + torch.arange(len(offsets))] = True
        state["t2d"] = known
    is_eagle = "eagle" in str(raw.get("architectures")).lower()
    if is_eagle and "speculators_model_type" not in raw:
        # In the format of SafeAILab, the authors of EAGLE.
        state = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in state.items()}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
    save_file(state, directory / checkpoint.kind.saved_as, metadata={"format": "pt"})
