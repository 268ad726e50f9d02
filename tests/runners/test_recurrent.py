"""Models with a recurrent state, measured alone: greedy text equals that of `generate`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from harness.decoding.batch import Request
from harness.decoding.loops import autoregressive
from harness.decoding.randomness import uniforms
from harness.decoding.warp import Warp
from harness.runners.base import RollbackError
from harness.runners.recurrent import RecurrentRunner

_SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "vocab_size": 97,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48, "head_dim": 8}
RECURRENT: dict[str, dict[str, Any]] = {
    "mamba": {"state_size": 8},
    "falcon_mamba": {"state_size": 8},
    "mamba2": {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 1},
    "rwkv": {"attention_hidden_size": 32},
    "lfm2": {**_ATTENTION, "layer_types": ["conv", "full_attention"]},
    "qwen3_next": {
        **_ATTENTION,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
}


def make(model_type: str) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **(_SMALL | RECURRENT[model_type]))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2 and "A_log" not in name:
                parameter.normal_(std=0.2)
    # Neither side ends a text by itself.
    model.generation_config.eos_token_id = None
    return model.eval()


@pytest.mark.parametrize("model_type", RECURRENT)
def test_greedy_text_is_that_of_generate(model_type: str) -> None:
    model, prompt = make(model_type), [5, 17, 44, 8, 61]
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)
    request = Request([prompt], uniforms(0, [0], 13, torch.device("cpu")), Warp(0.0, 0, 1.0), max_new_tokens=12)
    found = [token for record in autoregressive(RecurrentRunner(model), request) for token in record.tokens[0]]
    assert found == expected[0, len(prompt) :].tolist()
    assert len(set(found)) > 2, "a text of one token shows nothing"


def test_what_it_cannot_do_fails_loudly() -> None:
    runner = RecurrentRunner(make("mamba"))
    with pytest.raises(RollbackError, match="one row at a time"):
        runner.start([[1, 2], [3, 4]])
    runner.start([[1, 2]])
    runner.extend(torch.tensor([[3, 4]]))
    with pytest.raises(RollbackError, match="cannot take tokens back"):
        runner.keep([0])
