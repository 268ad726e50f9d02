"""Tiny random-weight models, saved as real checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoints import make_config, make_tokenizer
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from harness.config.settings import ModelSettings


@pytest.fixture
def save_model(tmp_path: Path) -> Callable[..., ModelSettings]:
    """A function that saves a random-weight model with its tokenizer and returns the settings that load it."""

    def save(
        model_type: str = "llama",
        name: str | None = None,
        dtype: torch.dtype = torch.float32,
        tokenizer: PreTrainedTokenizerFast | None = None,
        settings: dict[str, Any] | None = None,
        **overrides: Any,
    ) -> ModelSettings:
        directory = tmp_path / (name or model_type)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(make_config(model_type, **overrides), dtype=dtype)
        model.save_pretrained(directory)
        (tokenizer or make_tokenizer()).save_pretrained(directory)
        return ModelSettings(name=str(directory), repository=str(directory), **(settings or {}))

    return save
