"""Heads that are not trained yet, and heads as files: what `distill` begins with and what it leaves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from harness.config.settings import ModelSettings
from harness.drafting.head_formats import RawHead
from harness.drafting.heads import AnyHead, HeadCheckpoint
from harness.drafting.medusa import MedusaHead
from harness.models.checkpoints import Checkpoint

# Of Medusa heads, and one less than the queries of a DFlash block.
NUM_TOKENS = 4


def new_head(settings: ModelSettings, target: Checkpoint) -> HeadCheckpoint:
    """An EAGLE-3, DFlash or Medusa head for a target, without weights; `settings.name` says which.

    One layer (DFlash: two) as wide as the target's own.
    """
    kind, text = settings.name, target.config.get_text_config(decoder=True)
    own = target.settings
    raw, stored = _configuration(
        kind, text, own.name if Path(own.repository).is_dir() else own.repository
    )
    return HeadCheckpoint(
        kind, settings, RawHead(settings, target, raw).config(kind, stored, None), raw=raw
    )


def initialise(head: AnyHead, target: PreTrainedModel) -> None:
    """Weights to train from: an output matrix is the target's own, and Medusa's blocks change nothing at first."""
    output: Any = target.get_output_embeddings()
    for name, parameter in head.named_parameters():
        if parameter.shape == output.weight.shape:
            parameter.data.copy_(output.weight.data)
        elif name.endswith("bias") or isinstance(head, MedusaHead):
            nn.init.zeros_(parameter)
        elif parameter.dim() == 1:
            nn.init.ones_(parameter)
        else:
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)


def save_head(raw: Mapping[str, Any], head: AnyHead, directory: Path, dtype: torch.dtype) -> None:
    """Configuration and weights in the format that they were in, which `draft=` takes."""
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
    file = "medusa_lm_head.safetensors" if isinstance(head, MedusaHead) else "model.safetensors"
    save_file(state, directory / file, metadata={"format": "pt"})


def _configuration(
    kind: str, text: Any, verifier: str
) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """As speculators writes it, or Medusa's own; and the tensors that decide what the head borrows."""
    width, size = text.hidden_size, text.vocab_size
    if kind == "medusa":
        stored: dict[str, tuple[int, ...]] = {
            f"{head}.0.linear.weight": (width, width) for head in range(NUM_TOKENS)
        }
        stored |= {f"{head}.1.weight": (size, width) for head in range(NUM_TOKENS)}
        # The sizes are for vLLM, which takes others for granted.
        counts = {
            "medusa_num_heads": NUM_TOKENS,
            "medusa_num_layers": 1,
            "hidden_size": width,
            "vocab_size": size,
        }
        return counts | {"base_model_name_or_path": verifier}, stored
    heads = text.num_attention_heads
    layer = {
        "model_type": "llama" if kind == "eagle3" else "qwen3",
        "num_hidden_layers": 1 if kind == "eagle3" else 2,
        "hidden_size": width,
        "intermediate_size": getattr(text, "intermediate_size", None) or 4 * width,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(text, "num_key_value_heads", None) or heads,
        "head_dim": getattr(text, "head_dim", None) or width // heads,
        "hidden_act": "silu",
        "rms_norm_eps": getattr(text, "rms_norm_eps", 1e-5),
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": getattr(text, "max_position_embeddings", 4096),
        "vocab_size": size,
        "tie_word_embeddings": False,
        "attention_bias": False,
    }
    depth = text.num_hidden_layers
    read = [min(2, depth), depth // 2, max(1, depth - 3)]
    raw: dict[str, Any] = {
        "speculators_model_type": kind,
        "draft_vocab_size": size,
        "transformer_layer_config": layer,
        "target_hidden_size": width,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": NUM_TOKENS}],
            "verifier": {"name_or_path": verifier, "architectures": text.architectures or []},
        },
    }
    if kind == "eagle3":
        raw |= {"architectures": ["Eagle3Speculator"], "norm_before_residual": True}
        raw["eagle_aux_hidden_state_layer_ids"] = read
        return raw, {"lm_head.weight": (size, width)}
    mask = text.eos_token_id[0] if isinstance(text.eos_token_id, list) else text.eos_token_id
    raw |= {
        "architectures": ["DFlashSpeculator"],
        "block_size": NUM_TOKENS + 1,
        "mask_token_id": mask or 0,
    }
    raw["aux_hidden_state_layer_ids"] = read
    return raw, {}
