"""Domino heads against SpecForge's own module, saved by it and loaded here. See environment.sh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from architectures import VOCABULARY
from head_references import Expected, check_saved
from small_heads import target_model

pytestmark = pytest.mark.oracle
domino = pytest.importorskip("specforge.modeling.draft.domino")

BLOCK = 5


def build(shift_label: bool) -> Any:
    """A head of theirs with random weights."""
    config = AutoConfig.for_model(
        "qwen3", vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_target_layers=3, block_size=BLOCK,
        architectures=["DominoDraftModel"],
        dflash_config={
            "target_layer_ids": [0, 2], "mask_token_id": VOCABULARY - 1, "projector_type": "domino", "emb_dim": 6,
            "gru_hidden_dim": 12, "pure_draft_prefix_len": 1, "shift_label": shift_label,
        },
    )  # fmt: skip
    config._attn_implementation = "eager"
    model = domino.DominoDraftModel(config)
    torch.manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(mean=1.0 if "norm" in name else 0.0, std=0.2)
    return model.eval()


def expected_from(model: Any, target: PreTrainedModel) -> Expected:
    """Log-probabilities [K, V] by their passes over a block, each after the tokens `drawn` before it."""

    def expected(decided: Tensor, drawn: Tensor, features: Tensor) -> Tensor:
        masks = torch.full((BLOCK - 1,), VOCABULARY - 1)
        embed = target.get_input_embeddings()
        states = model(
            target_hidden=features.flatten(1)[None],
            noise_embedding=embed(torch.cat([decided[-1:], masks]))[None],
            position_ids=torch.arange(len(features) + BLOCK)[None],
            is_causal=False,
        )
        block = torch.cat([decided[-1:], drawn, masks])[:BLOCK]
        logits = model.apply_logits_head(
            target.get_output_embeddings()(states)[:, None],
            prev_token_embeddings=embed(block)[None, None],
            hidden_states=states[:, None],
        )[0, 0]
        first = 0 if model.shift_label else 1
        return logits[first : first + len(drawn)].log_softmax(-1)

    return expected


@pytest.mark.parametrize("shift_label", [False, True])
@pytest.mark.parametrize("names", ["of today", "of early checkpoints"])
def test_logits_equal_theirs(shift_label: bool, names: str, tmp_path: Path) -> None:
    theirs, target = build(shift_label), target_model()
    theirs.save_pretrained(tmp_path)
    if names == "of early checkpoints":
        path = tmp_path / "model.safetensors"
        tensors = load_file(path)
        nested = ("prefix_gru.", "embed_proj.")
        save_file(
            {
                f"logit_head.{key}" if key.startswith(nested) else key: tensors[key]
                for key in tensors
            },
            path,
        )
    check_saved(tmp_path, "domino", target, expected_from(theirs, target), BLOCK - 1)
