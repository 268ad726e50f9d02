"""The reference of an engine whose passes are captured: graphs that are replayed run no hooks of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.config.settings import DecodingSettings, ModelSettings
from harness.engines.record import Preparation
from harness.local.engine import reference
from harness.local.engine.engine import LocalEngine
from harness.local.engine.pair import Pair
from harness.local.engine.reference import open_reference
from loaded_pairs import load, on_gpu

PREPARATION = Preparation(
    decoding=DecodingSettings(max_new_tokens=12, temperature=0),
    runner="graphs_only",
    batch_size=2,
    longest_prompt=40,
)
TEXT = torch.randint(2, 200, (30,), generator=torch.Generator().manual_seed(0)).tolist()


def open_captured(pair: Pair) -> LocalEngine:
    engine = LocalEngine(on_gpu(pair), PREPARATION)
    assert engine.runner == "graphs_only"
    return engine


def test_experts_are_seen_in_texts_that_prepared_passes_could_read(
    save_model: Callable[..., ModelSettings], gpus: Any
) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 8}
    pair = load(save_model("mixtral", **sizes, **heads))
    expected = open_reference(pair, PREPARATION).experts(TEXT, 5)
    assert [len(choices) for choices in expected] == [5, 5]
    engine = open_captured(pair)
    assert engine.weights.reference.experts(TEXT, 5) == expected
    engine.close()


def test_routes_round_differently(
    save_model: Callable[..., ModelSettings], gpus: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, in a batch, behind a cache, and with embeddings that are changed by a unit in the last place."""
    found: list[Tensor] = []

    def recompute(*arguments: Any) -> Tensor:
        found.append(original(*arguments))
        return found[-1]

    original = reference.recompute
    monkeypatch.setattr(reference, "recompute", recompute)
    engine = open_captured(load(save_model(num_hidden_layers=2)))
    margin = engine.weights.reference.margin(TEXT, 7, 8)
    [routes] = found
    differences = [
        float((routes[one] - routes[other]).abs().max())
        for one in range(len(routes))
        for other in range(one)
    ]
    assert len(differences) == 10
    assert min(differences) > 0
    assert max(differences) < 1e-4
    assert margin.tolerance < 1e-3
    engine.close()
