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
from chains import request
from harness.config.settings import ModelSettings
from harness.local.decoding.warp import Warp
from harness.local.drafting.heads.checkpoint import read_head
from harness.local.models.checkpoints import Checkpoint
from harness.local.runners.snapshot import SnapshotRunner
from head_references import PROMPTS, Checked, Expected
from loops import speculative
from small_heads import head_drafter, target_model

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
    settings = ModelSettings(name="head", repository=str(tmp_path))
    head = read_head(
        settings, Checkpoint("model", ModelSettings(name="target", repository="-"), target.config)
    )
    assert head is not None
    assert head.kind.name == "domino"
    ours = head.load(torch.device("cpu"), torch.float32)
    checked = Checked(head_drafter(ours, target, Warp()), target, expected_from(theirs, target))
    runner = SnapshotRunner(target, hidden_layers=checked.layers)
    num_iterations = sum(
        1 for _ in speculative(runner, checked, request(PROMPTS, Warp(), length=24), BLOCK - 1)
    )
    print(f"largest difference {checked.error:.1e} over {num_iterations} iterations")
    assert checked.error < 1e-4, checked.error
