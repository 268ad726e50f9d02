from __future__ import annotations

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from harness.local.decoding.warp import Warp


def test_greedy_is_one_hot_on_the_first_maximum() -> None:
    assert Warp(temperature=0)(torch.tensor([[1.0, 3.0, 3.0]])).tolist() == [[0.0, 1.0, 0.0]]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("top_k", [0, 1, 5, 1000])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3, 1e-6, 1e-300])
def test_equals_transformers_warpers(temperature: float, top_k: int, top_p: float) -> None:
    logits = 3 * torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    expected = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    expected = TopPLogitsWarper(top_p)(None, expected).softmax(-1)
    torch.testing.assert_close(Warp(temperature, top_k, top_p)(logits), expected)


def test_half_precision_logits_become_float32_probabilities() -> None:
    probabilities = Warp(0.7, 3, 0.9)(torch.randn(2, 3, 20, dtype=torch.bfloat16))
    assert probabilities.dtype == torch.float32
    torch.testing.assert_close(probabilities.sum(-1), torch.ones(2, 3))
