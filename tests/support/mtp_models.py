"""Small models with random multi-token-prediction layers, and the names that published checkpoints give these."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_layers import MtpModel

from harness.local.drafting.heads.mtp import add_layer_fields

_MIXTURE = {
    "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 4, "n_routed_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
_WINDOW = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
_HYBRID = {
    "num_key_value_heads": 2, "head_dim": 8, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
QWEN_LAYOUT = ("qwen3_5_text", "qwen3_next", "qwen3_5_moe_text")
# Families whose number of layers transformers does not read.
UNNUMBERED = ("glm4_moe_lite", *QWEN_LAYOUT)
FAMILIES: dict[str, dict[str, Any]] = {
    # Its cache has states of two widths.
    "deepseek_v3": {
        "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    },
    "glm4_moe": {"num_key_value_heads": 2, "head_dim": 8},
    "glm4_moe_lite": {
        "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
        "v_head_dim": 8, "num_nextn_predict_layers": 1, "mlp_layer_types": ["dense", "sparse"],
    },
    # A window in the layer itself, and angles that differ by kind of layer.
    "mellum": {"num_key_value_heads": 2, "head_dim": 8, "num_mtp_layers": 1, **_WINDOW},
    # Qwen's layout, dense and with experts. Their targets have a recurrent state.
    "qwen3_5_text": {**_HYBRID, "mtp_num_hidden_layers": 1},
    "qwen3_next": {**_HYBRID, "shared_expert_intermediate_size": 16},
    "qwen3_5_moe_text": {
        **_HYBRID, "shared_expert_intermediate_size": 16, "mtp_num_hidden_layers": 1,
    },
}  # fmt: skip
if not hasattr(MtpModel, "forward_layer"):
    # An older transformers cannot tell which layers these have.
    for name in ("mellum", *UNNUMBERED):
        FAMILIES.pop(name)


def mtp_target(
    family: str, vocab_size: int = 97, **changes: Any
) -> tuple[PreTrainedModel, MtpModel]:
    """A target whose distributions are flat enough for random layers to be accepted now and then, and its layers."""
    if family in UNNUMBERED:
        changes.pop("num_mtp_layers", None)  # it is always one, under another name
    fields = _MIXTURE | FAMILIES[family] | changes
    config = AutoConfig.for_model(family, vocab_size=vocab_size, **fields)
    add_layer_fields(config)
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.device("meta"):
        layers = MtpModel(target, config.num_mtp_layers)
    layers.layers.to_empty(device="cpu")
    with torch.no_grad():
        for module in (target, layers.layers):
            for name, parameter in module.named_parameters():
                parameter.normal_(1.0 if "norm" in name else 0.0, 0.2 if "norm" in name else 0.3)
            for name, buffer in module.named_buffers():
                if "correction_bias" in name:
                    buffer.normal_(0.0, 0.1)
        target.get_output_embeddings().weight.mul_(0.15)
    return target, layers.eval()


def save_with_mtp(target: PreTrainedModel, layers: MtpModel, directory: Path) -> None:
    """Save both as published: behind the target's layers or under `mtp`, experts one by one, shared matrices again."""
    target.save_pretrained(directory)
    if target.config.model_type in UNNUMBERED:
        file = directory / "config.json"
        published = json.loads(file.read_text(encoding="utf-8"))
        for name in ("num_mtp_layers", "mtp_layer_types", "mtp_mlp_layer_types"):
            del published[name]
        file.write_text(json.dumps(published), encoding="utf-8")
    stored = load_file(directory / "model.safetensors")
    for name, tensor in layers.layers.state_dict().items():
        number, _, rest = name.partition(".")
        behind = target.config.num_hidden_layers + int(number)
        for part, piece in _experts(rest.removeprefix("mtp_block."), tensor).items():
            if target.config.model_type in ("mellum", *QWEN_LAYOUT):
                module, _, parameter = part.partition(".")
                owner = f"mtp.{_NAMES[module]}" if module in _NAMES else f"mtp.layers.0.{module}"
                stored[f"{owner}.{parameter}"] = piece.clone()
            else:
                layer = f"model.layers.{behind}"
                published_part = part.replace("post_norm", "shared_head.norm")
                stored[f"{layer}.{published_part}"] = piece.clone()
                embedding, output = stored["model.embed_tokens.weight"], stored["lm_head.weight"]
                stored[f"{layer}.embed_tokens.weight"] = embedding.clone()
                stored[f"{layer}.shared_head.head.weight"] = output.clone()
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})


_NAMES = {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding"}
_NAMES |= {"hnorm": "pre_fc_norm_hidden", "post_norm": "norm"}


def _experts(name: str, tensor: Tensor) -> dict[str, Tensor]:
    owner, _, matrix = name.rpartition(".")
    if matrix == "gate_up_proj":
        halves = [half for expert in tensor for half in expert.chunk(2)]
        sides = ("gate", "up")
        return {
            f"{owner}.{i // 2}.{sides[i % 2]}_proj.weight": half for i, half in enumerate(halves)
        }
    if matrix == "down_proj":
        return {f"{owner}.{i}.down_proj.weight": expert for i, expert in enumerate(tensor)}
    return {name: tensor}
