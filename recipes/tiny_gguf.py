"""Writes the shipped pair as GGUF files, for llama.cpp: `python -m recipes.tiny_gguf DIRECTORY`.

DIRECTORY then contains `tiny.gguf` and `tiny_draft.gguf` with 32-bit floats, as in harness on a CPU: greedy texts are
identical, token for token. Needs the extra `gguf`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import gguf
import torch
from safetensors.torch import load_file

import harness

SHIPPED = Path(harness.__file__).parent / "local" / "models" / "shipped"
PAIR = ("tiny", "tiny_draft")
# The pair was not trained on chats. With this template, a chat with one message is the text of that message.
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
ROTATED = ("q_proj.weight", "k_proj.weight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    write_pair(parser.parse_args().directory)


def write_pair(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name in PAIR:
        write(SHIPPED / name, directory / f"{name}.gguf")


def write(checkpoint: Path, file: Path) -> None:
    """Write a Llama checkpoint with a byte-level BPE tokenizer and tied embeddings as a GGUF file."""
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_name(checkpoint.name)
    add_shape(writer, config)
    add_tokenizer(writer, json.loads((checkpoint / "tokenizer.json").read_text(encoding="utf-8")))
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, weight in load_file(checkpoint / "model.safetensors").items():
        if name.endswith(ROTATED):
            weight = neighbouring_pairs(weight, config["head_dim"])
        stored_name = names.get_name(name, try_suffixes=(".weight",))
        writer.add_tensor(stored_name, weight.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_shape(writer: gguf.GGUFWriter, config: dict) -> None:
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])


def add_tokenizer(writer: gguf.GGUFWriter, tokenizer: dict) -> None:
    """Add a byte-level BPE tokenizer that splits texts into single digits and GPT-2's words. llama.cpp calls this kind
    of splitting `smollm`.
    """
    model = tokenizer["model"]
    special = {token["id"] for token in tokenizer["added_tokens"]}
    ids = sorted(model["vocab"].values())
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(sorted(model["vocab"], key=model["vocab"].get))
    writer.add_token_types([control if token in special else normal for token in ids])
    writer.add_token_merges([" ".join(merge) for merge in model["merges"]])


def neighbouring_pairs(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Reorder rows for rotary embeddings: llama.cpp rotates dimensions 2i and 2i + 1 of a head together, transformers
    rotates i and i + head_dim/2.
    """
    by_half = weight.unflatten(0, (-1, 2, head_dim // 2))
    return by_half.transpose(1, 2).reshape(weight.shape)


if __name__ == "__main__":
    main()
