"""EAGLE-3 and P-EAGLE against a slow computation without a cache, and their output against `generate`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from chains import GREEDY
from fakes import Scripted
from harness.decoding.warp import Warp
from harness.drafting.kinds.eagle3 import EagleHead
from head_references import (
    Expected,
    attend,
    check_against,
    check_greedy,
    mlp,
    rms,
    spread,
)
from small_heads import eagle_head, layer_config, target_model


def run_layers(head: EagleHead, embedded: Tensor, states: Tensor) -> Tensor:
    """All entries [n, D], causal, without a cache."""
    at = torch.arange(len(states))
    seen = at[:, None] >= at
    for index, (layer, window) in enumerate(zip(head.layers, head.windows, strict=True)):
        visible = seen if window is None else seen & (at[:, None] - at < window)
        normed, x = states, rms(states, layer.input_layernorm)
        if index == 0:
            normed = rms(states, layer.hidden_norm)
            x = torch.cat([rms(embedded, layer.input_layernorm), normed], dim=-1)
        residual = normed if head.config.norm_before_residual and index == 0 else states
        states = residual + attend(layer.self_attn, x, x, at, at, visible)
        states = states + mlp(layer, rms(states, layer.post_attention_layernorm))
    return states


def joined(head: EagleHead, features: Tensor) -> Tensor:
    if head.input_norm is not None:
        features = rms(features.flatten(-2), head.input_norm).view_as(features)
    if head.fc_norm is not None:
        parts = [rms(features[:, i], norm) for i, norm in enumerate(head.fc_norm)]
        features = torch.stack(parts, dim=1)
    return head.fc(features.flatten(-2))


def eagle_expected(head: EagleHead, embedding: Any, output: Any) -> Expected:
    def chain(decided: Tensor, drawn: Tensor, features: Tensor) -> Tensor:
        embedded, states, found = embedding(decided[1:]), joined(head, features), []
        for token in drawn:
            last = run_layers(head, embedded, states)[-1]
            normed = rms(last, head.norm)
            found.append(spread(head, output(normed)))
            embedded = torch.cat([embedded, embedding(token)[None]])
            states = torch.cat([states, (normed if head.config.norm_output else last)[None]])
        return torch.stack(found)

    def parallel(decided: Tensor, drawn: Tensor, features: Tensor) -> Tensor:
        masks = len(drawn) - 1
        mask_token = torch.full((masks,), head.config.mask_token_id)
        hidden = head.mask_hidden.view(1, *features.shape[1:]).expand(masks, -1, -1)
        states = joined(head, torch.cat([features, hidden]))
        states = run_layers(head, embedding(torch.cat([decided[1:], mask_token])), states)
        return spread(head, output(rms(states[-len(drawn) :], head.norm)))

    return parallel if head.config.mask_token_id is not None else chain


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
    check_against(target, head.drafter(target, Warp()), eagle_expected(head, embedding, output))


def test_a_sliding_window_and_a_second_layer() -> None:
    kinds = ["full_attention", "sliding_attention"]
    transformer = layer_config(
        "qwen3", 2, layer_types=kinds, use_sliding_window=True, sliding_window=5
    )
    target, head = target_model(), eagle_head(transformer)
    assert head.windows == [None, 5]
    check_against(
        target, head.drafter(target, Warp()), eagle_expected(head, head.embed_tokens, head.lm_head)
    )


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
@pytest.mark.parametrize("mask_token_id", [None, 96])
def test_greedy_output_is_that_of_generate(model_type: str, mask_token_id: int | None) -> None:
    target = target_model(model_type)
    check_greedy(
        target,
        eagle_head(layer_config(model_type), mask_token_id=mask_token_id).drafter(target, GREEDY),
    )


@pytest.mark.parametrize("mask_token_id", [None, 96])
def test_what_is_decided_without_a_proposal_is_read_as_well(
    mask_token_id: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.drafting.head_drafter.MOST_UNREAD", 8)
    target, head = target_model(), eagle_head(layer_config("llama"), mask_token_id=mask_token_id)
    expected = eagle_expected(head, head.embed_tokens, head.lm_head)
    check_against(target, head.drafter(target, Warp()), expected, Scripted([0, 0, 4, 0, 3, 4]))
