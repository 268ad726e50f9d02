"""Settings of any command, with as little said as there must be."""

import dataclasses
from typing import Any

from harness.config.settings import (
    DecodingSettings,
    ModelSettings,
    PlacementSettings,
    PromptSettings,
    ResultSettings,
)
from harness.local.drafting.method import ModelDraftSettings


def settings_of(kind: type, **changes: Any) -> Any:
    """Settings of this kind: 13B with 7B, and what is changed."""
    parts = {
        "model": ModelSettings(name="13B", repository="a/13B"), 
        "draft": ModelDraftSettings(name="7B", repository="a/7B"),
        "decoding": DecodingSettings(), "placement": PlacementSettings(), "results": ResultSettings(file="results.csv"),
        "prompts": PromptSettings(name="english", file="english.txt"),
    }  # fmt: skip
    asked = {
        field.name: parts[field.name] for field in dataclasses.fields(kind) if field.name in parts
    }
    return kind(**(asked | changes))
