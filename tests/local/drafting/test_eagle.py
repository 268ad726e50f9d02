"""EAGLE-3 and P-EAGLE against a slow computation without a cache, and their output against `generate`."""

from __future__ import annotations

from typing import Any

import pytest

from chains import GREEDY
from eagle_reference import eagle_expected
from fakes import Scripted
from harness.local.decoding.warp import Warp
from head_references import check_against, check_greedy
from small_heads import eagle_head, head_drafter, layer_config, target_model


@pytest.mark.parametrize(
    ("style", "changes"),
    [
        ("llama", {}),
        ("llama", {"reduced": True, "norm_before_residual": True, "norm_before_fc": True}),
        (
            "qwen3",
            {"fc_norm": True, "norm_output": True, "own_embedding": False, "own_output": False},
        ),
        ("llama", {"mask_token_id": 96, "reduced": True}),
    ],
    ids=["plain", "reduced vocabulary", "3.1, the target's vocabulary", "P-EAGLE"],
)
def test_distributions_equal_those_without_a_cache(style: str, changes: dict[str, Any]) -> None:
    target = target_model()
    head = eagle_head(layer_config(style, 3 if "mask_token_id" in changes else 1), **changes)
    embedding = head.embed_tokens or target.get_input_embeddings()
    output = head.lm_head or target.get_output_embeddings()
    check_against(
        target, head_drafter(head, target, Warp()), eagle_expected(head, embedding, output)
    )


def test_a_sliding_window_and_a_second_layer() -> None:
    kinds = ["full_attention", "sliding_attention"]
    transformer = layer_config(
        "qwen3", 2, layer_types=kinds, use_sliding_window=True, sliding_window=5
    )
    target, head = target_model(), eagle_head(transformer)
    assert head.windows == [None, 5]
    check_against(
        target,
        head_drafter(head, target, Warp()),
        eagle_expected(head, head.embed_tokens, head.lm_head),
    )


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
@pytest.mark.parametrize("mask", [{}, {"mask_token_id": 96}], ids=["EAGLE-3", "P-EAGLE"])
def test_greedy_output_is_that_of_generate(model_type: str, mask: dict[str, int]) -> None:
    target = target_model(model_type)
    check_greedy(
        target,
        head_drafter(eagle_head(layer_config(model_type), **mask), target, GREEDY),
    )


@pytest.mark.parametrize("mask", [{}, {"mask_token_id": 96}], ids=["EAGLE-3", "P-EAGLE"])
def test_what_is_decided_without_a_proposal_is_read_as_well(
    mask: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.local.drafting.heads.drafter.MOST_UNREAD", 8)
    target, head = target_model(), eagle_head(layer_config("llama"), **mask)
    expected = eagle_expected(head, head.embed_tokens, head.lm_head)
    check_against(
        target, head_drafter(head, target, Warp()), expected, Scripted([0, 0, 4, 0, 3, 4])
    )
