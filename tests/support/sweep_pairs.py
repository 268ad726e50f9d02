"""Models that misbehave, as directories that any command loads: what a sweep has to survive."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tiny_checkpoints import make_tokenizer

# A forward pass over this many tokens goes wrong: verification of one draft token fewer.
FATAL_WIDTH = 8

_SOURCE = f"""
import ctypes, os, signal, time
import torch
from transformers import LlamaConfig, LlamaForCausalLM


class WickedConfig(LlamaConfig):
    model_type = "wicked"

    def __init__(self, misbehaviour="none", **others):
        self.misbehaviour = misbehaviour
        super().__init__(**others)


class WickedForCausalLM(LlamaForCausalLM):
    config_class = WickedConfig

    def forward(
        self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, **others
    ):
        has_read = past_key_values is not None and past_key_values.get_seq_length() > 0
        if input_ids.shape[1] == {FATAL_WIDTH} and has_read:
            misbehaviour = self.config.misbehaviour
            if misbehaviour == "exception":
                raise ZeroDivisionError("a bug in the model")
            if misbehaviour == "memory":
                torch.empty(2**60)
            if misbehaviour == "segfault":
                ctypes.string_at(0)
            if misbehaviour == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if misbehaviour == "hang":
                time.sleep(3600)
        return super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            **others,
        )
"""


def save_wicked(directory: Path, misbehaviour: str) -> Path:
    """Save a small Llama whose forward pass over `FATAL_WIDTH` tokens misbehaves; loads with trust_remote_code."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    config = LlamaConfig(
        vocab_size=258,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=256,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    (directory / "modeling_wicked.py").write_text(_SOURCE)
    described = json.loads((directory / "config.json").read_text())
    described |= {
        "model_type": "wicked",
        "architectures": ["WickedForCausalLM"],
        "misbehaviour": misbehaviour,
        "auto_map": {
            "AutoConfig": "modeling_wicked.WickedConfig",
            "AutoModelForCausalLM": "modeling_wicked.WickedForCausalLM",
        },
    }
    (directory / "config.json").write_text(json.dumps(described))
    return directory
