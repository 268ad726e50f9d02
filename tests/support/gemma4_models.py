"""Small random Gemma 4 models, and assistants for them, by transformers' own classes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
)

from harness.config.settings import ModelSettings
from harness.local.decoding.protocols import Runner
from harness.local.decoding.warp import AnyWarp
from harness.local.drafting.heads.drafter import HeadDrafter
from harness.local.drafting.heads.formats import StoredHead
from harness.local.drafting.kinds.gemma4_assistant import RECORD, AssistantHead
from harness.local.models.checkpoints import Checkpoint

WINDOW = 6
VOCABULARY = 99
_SIZES = {
    "vocab_size": VOCABULARY, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "global_head_dim": 16, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
    "sliding_window": WINDOW, "max_position_embeddings": 512, "pad_token_id": None, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip
_NO_FURTHER_EMBEDDINGS = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
_TYPES = ["sliding_attention", "full_attention"]


def settings_of(name: str) -> ModelSettings:
    return ModelSettings(name=name, repository=name)


def target_of(kind: str, num_shared: int = 0, **changes: Any) -> PreTrainedModel:
    """Its distributions are flat enough for a random assistant to be accepted now and then.

    Args:
        kind: `gemma4` or `gemma4_unified`.
        num_shared: how many of its last layers make no keys, of six.
    """
    further = _NO_FURTHER_EMBEDDINGS if kind == "gemma4" else {}
    if num_shared:
        changes["num_kv_shared_layers"] = num_shared
    if num_shared and kind == "gemma4":
        # transformers 5.23 gets on with one and not the other only if it returns hidden states.
        changes |= {"hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": VOCABULARY}
    sizes = _SIZES | further | {"hidden_size": 32, "layer_types": 3 * _TYPES} | changes
    config = AutoConfig.for_model(f"{kind}_text", num_hidden_layers=6, **sizes)
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomize(target)
    return target


def assistant_config(kind: str, centroids: bool, **changes: Any) -> Any:
    further = _NO_FURTHER_EMBEDDINGS if kind == "gemma4" else {}
    text = _SIZES | further | {"hidden_size": 16, "num_hidden_layers": 3, "num_kv_shared_layers": 3}
    text |= {"layer_types": ["sliding_attention", *_TYPES], "model_type": f"{kind}_text"}
    sizes = {"backbone_hidden_size": 32, "num_centroids": 9, "centroid_intermediate_top_k": 2}
    return AutoConfig.for_model(
        f"{kind}_assistant",
        **{**sizes, "use_ordered_embeddings": centroids, **changes, "text_config": text},
    )


def assistant_of(config: Any) -> PreTrainedModel:
    """transformers' own model."""
    with buildable(type(config.text_config)):
        torch.manual_seed(1)
        assistant = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
    randomize(assistant)
    if config.use_ordered_embeddings:
        assistant.masked_embedding.token_ordering.copy_(torch.randperm(VOCABULARY))
    return assistant


@contextmanager
def buildable(text: Any) -> Iterator[None]:
    """transformers 5.23.0 asks assistants for the layers that make their keys, and refuses them."""
    modes = getattr(text, "kv_sharing_modes", None)
    if modes is None:
        yield
        return
    text.kv_sharing_modes = property(lambda config: ["reuse"] * config.num_hidden_layers)
    try:
        yield
    finally:
        text.kv_sharing_modes = modes


def randomize(model: PreTrainedModel) -> None:
    """Attention has no other scale than its queries' norm: a small one keeps rounding small."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean, deviation = (1.0, 0.2) if "norm" in name else (0.0, 0.2)
            parameter.normal_(mean, deviation)
            if "q_norm" in name or "embed_tokens" in name:
                parameter.mul_(0.1 if "embed" in name else 0.2)
    model.eval().requires_grad_(False)


def head_of(target: PreTrainedModel, assistant: PreTrainedModel) -> AssistantHead:
    """Our head, with the weights of transformers' model."""
    checkpoint = Checkpoint("model", settings_of("target"), target.config)
    stored = StoredHead(settings_of("assistant"), checkpoint, assistant.config.to_dict())
    head = AssistantHead(RECORD.config(stored, None))
    weights = {
        name: value for name, value in assistant.state_dict().items() if name != "lm_head.weight"
    }
    head.load_state_dict(weights)
    return head.eval().requires_grad_(False)


def drafter_over(
    runner: Runner, head: AssistantHead, target: PreTrainedModel, warp: AnyWarp
) -> HeadDrafter:
    drafter = head.drafter(target, warp)
    drafter.target_runner = runner
    return drafter
