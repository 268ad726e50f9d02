"""The columns about weights: which they are, their formats, sizes and places."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from harness.config.run import RunSettings
from harness.results.weights import weights_identity

if TYPE_CHECKING:
    import torch

    from harness.engines.pair import PlacedPair


def identity_columns(settings: RunSettings) -> dict[str, str | None]:
    """The identities of the weights that the settings name; none for random ones."""
    if settings.weights == "random":
        return {}
    columns = {"model": "weights_identity", "draft": "draft_weights_identity"}
    return {columns[role]: weights_identity(model) for role, model in settings.models.items()}


def placed_columns(placed: PlacedPair) -> dict[str, Any]:
    """The formats, sizes and places of the target and of what drafts."""
    # Only some ways to draft, such as early_exit, have the setting `draft.layers`.
    columns: dict[str, Any] = {"draft_layers": getattr(placed.draft_settings, "layers", None)}
    if placed.translation is not None:
        columns["translation"] = placed.translation.method
    target = placed.models[0]
    columns |= _columns_of_one("", target.dtype, target.placement.bytes_per_device)
    draft = placed.draft_model
    if placed.head is not None:
        # A head is beside the target's first layers, in the target's format.
        head_bytes = {str(placed.devices[0]): placed.sketches[1].weight_bytes}
        columns |= _columns_of_one("draft_", target.dtype, head_bytes)
    elif draft is not None:
        columns |= _columns_of_one("draft_", draft.dtype, draft.placement.bytes_per_device)
    return columns


def _columns_of_one(prefix: str, dtype: torch.dtype, sizes: dict[str, int]) -> dict[str, Any]:
    return {
        f"{prefix}dtype": str(dtype).removeprefix("torch."),
        f"{prefix}weight_bytes": sizes,
    }
