"""Packed heads: the model has its own attention again when its runners are closed."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedModel

from architectures import PROMPTS, random_model
from harness.local.drafting.early_exit import truncated
from harness.local.runners.attention import PACKED, PLAIN
from harness.local.runners.compiled import CompiledRunner
from harness.local.runners.slots import UnsupportedModelError
from harness.local.runners.static import StaticRunner


def attention_of(model: Any) -> Any:
    (implementation,) = {
        module.config._attn_implementation
        for module in model.modules()
        if hasattr(module, "config")
    }
    assert model.config._attn_implementation == implementation
    return implementation


def test_heads_are_packed_until_the_last_runner_is_closed() -> None:
    model = random_model("llama")
    first, second = StaticRunner(model), StaticRunner(model)
    assert attention_of(model) == PACKED
    first.close()
    first.close()
    assert attention_of(model) == PACKED
    second.close()
    assert attention_of(model) == PLAIN


def test_a_model_with_shared_layers_keeps_packed_heads() -> None:
    model = random_model("llama")
    shorter: PreTrainedModel = truncated(model, 1)
    target, draft = StaticRunner(model), StaticRunner(shorter)
    target.close()
    draft.start(PROMPTS)
    assert attention_of(shorter) == PACKED
    draft.close()
    assert attention_of(model) == attention_of(shorter) == PLAIN


def test_a_runner_that_nobody_closed_gives_it_back() -> None:
    model = random_model("llama")
    StaticRunner(model)
    assert attention_of(model) == PLAIN


def test_a_refused_model_has_its_own_attention() -> None:
    model: Any = random_model("llama")
    model.hf_device_map = {"model": 0, "lm_head": 1}
    with pytest.raises(UnsupportedModelError, match="on several devices"):
        CompiledRunner(model)
    assert attention_of(model) == PLAIN
