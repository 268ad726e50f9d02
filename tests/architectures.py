"""Small models with random weights, one of each architecture the eager runner is held to."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCABULARY = 97

_LLAMA_SHAPED = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
# A window shorter than the sequences of the tests, so that it matters.
_WINDOW = {"sliding_window": 8}

ARCHITECTURES: dict[str, dict[str, object]] = {
    "llama": {"model_type": "llama", **_LLAMA_SHAPED},
    "gpt2": {"model_type": "gpt2", "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 256},
    "opt": {
        "model_type": "opt", "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
        "max_position_embeddings": 256, "word_embed_proj_dim": 32,
    },
    "gpt_neox": {
        "model_type": "gpt_neox", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 4, "max_position_embeddings": 256,
    },
    "bloom": {"model_type": "bloom", "hidden_size": 32, "n_layer": 3, "n_head": 4},
    "qwen2": {"model_type": "qwen2", **_LLAMA_SHAPED},
    "mistral": {"model_type": "mistral", **_LLAMA_SHAPED, **_WINDOW, "head_dim": 8},
    "gemma2": {"model_type": "gemma2", **_LLAMA_SHAPED, **_WINDOW, "head_dim": 8},
    "falcon": {"model_type": "falcon", "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4},
    "falcon_alibi": {
        "model_type": "falcon", "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "alibi": True,
    },
    "gemma": {"model_type": "gemma", **_LLAMA_SHAPED, "head_dim": 8},
    "phi3": {"model_type": "phi3", **_LLAMA_SHAPED},
}  # fmt: skip

# Those that a runner on a cache of fixed size refuses, and why.
NOT_STATIC = {"bloom": "takes no positions", "falcon_alibi": "ALiBi"}


def random_model(name: str, seed: int = 0, **changes: object) -> PreTrainedModel:
    """A float32 model of the architecture, with weights so large that its greedy output does not repeat one token."""
    special = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    arguments = {**ARCHITECTURES[name], **special, **changes}
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**arguments), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(std=0.3)
    return model.eval()


def close(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((actual - expected).norm() / expected.norm() < 1e-5)
