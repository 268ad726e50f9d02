"""Columns that the rows of every command share: what determines a measurement beyond what readers look at first."""

from __future__ import annotations

import json
from typing import Any

from harness.config.commands import RunSettings
from harness.config.settings import DecodingSettings
from harness.models.loading import PlannedPair


def decoding_columns(decoding: DecodingSettings) -> dict[str, Any]:
    """How tokens were chosen, beyond K and temperature."""
    return {
        "top_k": decoding.top_k,
        "top_p": decoding.top_p,
        "rule": decoding.rule,
        "lenience": decoding.lenience,
        "synthetic_acceptance": decoding.synthetic_acceptance,
        "lossy": decoding.lossy,
        "max_new_tokens": decoding.max_new_tokens,
        "ignore_eos": decoding.ignore_eos,
    }


def model_columns(settings: RunSettings) -> dict[str, Any]:
    """Which weights were asked for, and how they are talked to."""
    draft = settings.draft
    return {
        "weights": settings.weights,
        "chat_template": settings.chat_template,
        "repository": settings.model.repository,
        "draft_repository": draft and draft.repository,
        "quantization": settings.model.quantization,
        "draft_quantization": draft and draft.quantization,
        "placement": settings.model.placement or settings.placement.strategy,
    }


def placement_columns(planned: PlannedPair | None) -> dict[str, Any]:
    """What was decided before loading: types, and the bytes of weights on each device as JSON; None without a plan."""
    models = [] if planned is None else list(zip(planned.dtypes, planned.placements, strict=True))
    if planned is not None and planned.shared_draft is not None:
        models *= 2
    columns: dict[str, Any] = {}
    for number, prefix in enumerate(("", "draft_")):
        dtype, placement = models[number] if number < len(models) else (None, None)
        columns[f"{prefix}dtype"] = str(dtype).removeprefix("torch.") if dtype else None
        columns[f"{prefix}weight_bytes"] = json.dumps(placement.bytes_per_device) if placement else None
    return columns
