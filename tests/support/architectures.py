"""Small models with random weights, one of each architecture the eager runner is held to."""

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
    "gpt_neo": {
        "model_type": "gpt_neo", "hidden_size": 32, "num_layers": 3, "num_heads": 4, "max_position_embeddings": 256,
        "attention_types": [[["local", "global", "local"], 1]], "window_size": 8,
    },
    "gemma4_text": {
        "model_type": "gemma4_text", **_LLAMA_SHAPED, **_WINDOW, "head_dim": 8, "global_head_dim": 16,
        "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "attention_k_eq_v": True,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    },
    "gpt_oss": {
        "model_type": "gpt_oss", **_LLAMA_SHAPED, **_WINDOW, "head_dim": 8, "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "llama4_text": {
        "model_type": "llama4_text", **_LLAMA_SHAPED, "head_dim": 8, "intermediate_size_mlp": 64,
        "num_local_experts": 4, "attention_chunk_size": 8,
    },
}  # fmt: skip

_TWO_KINDS = ["linear_attention", "full_attention", "linear_attention"]
_LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8
}  # fmt: skip
# A chunk shorter than the sequences, too. Every sequence is filled up to whole chunks, which are 256 long by default.
_CHUNK = 8
_MAMBA = {
    "mamba_chunk_size": _CHUNK,
    "mamba_d_state": 8,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
}
_ATTENTION = {**_LLAMA_SHAPED, "head_dim": 8, "tie_word_embeddings": False}

# Models with a recurrent state that read several tokens at once as they read them one by one.
RECURRENT: dict[str, dict[str, object]] = {
    "mamba2": {
        "model_type": "mamba2", "hidden_size": 32, "num_hidden_layers": 3, "state_size": 8, "num_heads": 8,
        "head_dim": 8, "n_groups": 1, "chunk_size": _CHUNK,
    },
    "lfm2": {"model_type": "lfm2", **_ATTENTION, "layer_types": ["conv", "full_attention", "conv"]},
    "qwen3_next": {
        "model_type": "qwen3_next", **_ATTENTION, **_LINEAR, "layer_types": _TWO_KINDS, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    },
    "qwen3_5_text": {"model_type": "qwen3_5_text", **_ATTENTION, **_LINEAR, "layer_types": _TWO_KINDS},
    "falcon_h1": {"model_type": "falcon_h1", **_ATTENTION, **_MAMBA, "mamba_d_ssm": 64},
    "nemotron_h": {
        "model_type": "nemotron_h", **_ATTENTION, "layers_block_type": ["mamba", "attention", "mamba"],
        "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 1, "expand": 2,
        "chunk_size": _CHUNK,
    },
    "granitemoehybrid": {
        "model_type": "granitemoehybrid", **_ATTENTION, **_MAMBA, "layer_types": ["mamba", "attention", "mamba"],
        "num_local_experts": 0, "shared_intermediate_size": 48,
    },
    "bamba": {"model_type": "bamba", **_ATTENTION, **_MAMBA, "attn_layer_indices": [1]},
}  # fmt: skip

# Architectures that do not.
ONE_BY_ONE: dict[str, dict[str, object]] = {
    "mamba": {"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 3, "state_size": 8},
    "falcon_mamba": {"model_type": "falcon_mamba", "hidden_size": 32, "num_hidden_layers": 3, "state_size": 8},
    "jamba": {
        "model_type": "jamba", **_ATTENTION, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1,
        "mamba_d_state": 8, "mamba_dt_rank": 4,
    },
}  # fmt: skip

# Architectures that a runner on a cache of fixed size refuses, and why.
NOT_STATIC = {
    "bloom": "accepts no positions",
    "falcon_alibi": "ALiBi",
    # Its windows count from the end of the cache.
    "gpt_neo": "differ from the model's own",
    "llama4_text": "chunked_attention",
}
SERVED = [name for name in ARCHITECTURES if name not in NOT_STATIC]

# Different lengths.
PROMPTS = [[5, 9, 23, 4, 17, 31, 8], [11, 3], [40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50]]


def random_model(name: str, seed: int = 0, **changes: object) -> PreTrainedModel:
    """A float32 model of the architecture, with weights so large that its greedy output does not repeat one token."""
    special = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    arguments = {**(ARCHITECTURES | RECURRENT | ONE_BY_ONE)[name], **special, **changes}
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**arguments), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2 and "A_log" not in name:
                parameter.normal_(std=0.3)
    return model.eval()


def random_pair(name: str, **changes: object) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A target, and a draft that agrees with it sometimes: the target, disturbed."""
    target, draft = random_model(name, **changes), random_model(name, seed=1, **changes)
    with torch.no_grad():
        for parameter, original in zip(draft.parameters(), target.parameters(), strict=True):
            parameter.copy_(original + 0.05 * parameter)
    return target, draft


def generated(model: PreTrainedModel, prompt: list[int], length: int) -> list[int]:
    """The greedy text of transformers' own `generate`; no token ends it."""
    ids = torch.tensor([prompt])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), min_new_tokens=length, max_new_tokens=length, do_sample=False,
        pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    return output[0, len(prompt) :].tolist()


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> bool:
    return bool((actual - expected).norm() / expected.norm() < tolerance)


def logits_without_cache(model: PreTrainedModel, sequence: list[int]) -> torch.Tensor:
    """[len(sequence), V], the row alone, without padding and without a cache."""
    with torch.inference_mode():
        return model(input_ids=torch.tensor([sequence]), use_cache=False).logits[0]
