"""The configuration of a new head, which `distill` will train, in speculators' format.

`HeadKind.new` of the kinds with transformer layers calls this, and adds what the kind needs.
"""

from __future__ import annotations

from typing import Any

# Draft tokens of a head that is trained here: Medusa heads, and one less than the queries of a
# DFlash block.
NUM_TOKENS = 4


def speculators_configuration(
    kind: str, style: str, num_layers: int, text: Any, verifier: str
) -> tuple[dict[str, Any], list[int]]:
    """Return the contents of a config.json for layers as wide as the target's, and the layers of
    the target that such heads usually read.

    Args:
        kind: speculators' name of the kind, as `eagle3`.
        style: transformers' name for the style of its layers, `llama` or `qwen3`.
        num_layers: how many layers the head has.
        text: the target's text configuration.
        verifier: the target's name or repository.
    """
    width = text.hidden_size
    heads = text.num_attention_heads
    layer = {
        "model_type": style,
        "num_hidden_layers": num_layers,
        "hidden_size": width,
        "intermediate_size": getattr(text, "intermediate_size", None) or 4 * width,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(text, "num_key_value_heads", None) or heads,
        "head_dim": getattr(text, "head_dim", None) or width // heads,
        "hidden_act": "silu",
        "rms_norm_eps": getattr(text, "rms_norm_eps", 1e-5),
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": getattr(text, "max_position_embeddings", 4096),
        "vocab_size": text.vocab_size,
        "tie_word_embeddings": False,
        "attention_bias": False,
    }
    proposal = {"proposal_type": "greedy", "speculative_tokens": NUM_TOKENS}
    raw: dict[str, Any] = {
        "speculators_model_type": kind,
        "draft_vocab_size": text.vocab_size,
        "transformer_layer_config": layer,
        "target_hidden_size": width,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": verifier, "architectures": text.architectures or []},
        },
    }
    depth = text.num_hidden_layers
    return raw, [min(2, depth), depth // 2, max(1, depth - 3)]
