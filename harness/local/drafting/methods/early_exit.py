"""Early exit: the target's own first layers draft, with its norm and head."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.config.settings import DecodingSettings, require
from harness.local.drafting.method import LoadedPair, MakeDrafter, Method
from harness.local.drafting.methods.model import SampledDraftSettings

if TYPE_CHECKING:
    import torch

    from harness.local.decoding.protocols import Runner
    from harness.local.drafting.heads.find import DraftPlan
    from harness.local.models.checkpoints import Checkpoint, ReadCheckpoint
    from harness.local.models.loading import LoadedModel
    from harness.local.models.sketch import Sketch


@dataclass(frozen=True, kw_only=True)
class EarlyExitSettings(SampledDraftSettings):
    """Settings of `draft=early_exit`; `draft=early_exit_8` has 8 layers.

    Attributes:
        layers: how many of the target's layers draft; a quarter of them if None.
    """

    # One number in a tuple, because `draft.layers` of a head is a list.
    layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = "must be one number: how many of the target's layers draft"
        require(self.layers is None or len(self.layers) == 1, "layers", rule, self.layers)

    @property
    def num_layers(self) -> int:
        """The number of layers that draft, in the settings of a plan."""
        assert self.layers is not None, "EarlyExit.plan fills it in"
        return self.layers[0]


class EarlyExit(Method):
    """The first layers of the target as a draft model without weights of its own."""

    name = "early_exit"
    summary = "the target's own first layers, a quarter of them; early_exit_8 has 8"
    settings = EarlyExitSettings
    memory = "shared"

    def choice(self, name: str) -> dict[str, Any] | None:
        """Return no settings for `early_exit`, and 8 layers for `early_exit_8`."""
        number = re.fullmatch(r"early_exit_(\d+)", name)
        if number is not None:
            return {"layers": [int(number[1])]}
        return super().choice(name)

    def plan(
        self,
        settings: EarlyExitSettings,
        target: Checkpoint,
        read_checkpoint: ReadCheckpoint,
        needs_weights: bool,
    ) -> DraftPlan:
        """Return a plan whose settings have the number of layers, a quarter if none was given."""
        from harness.local.drafting.early_exit import chosen_num_layers
        from harness.local.drafting.heads.find import DraftPlan

        layers = (chosen_num_layers(settings.layers, target.config),)
        return DraftPlan(dataclasses.replace(settings, layers=layers))

    def sketch(self, plan: DraftPlan, target: Checkpoint, dtype: torch.dtype) -> Sketch:
        """Return a sketch without weights: a cache, and the target's layers that are read."""
        from harness.local.drafting.early_exit import exit_sketch

        settings: Any = plan.settings
        return exit_sketch(target, settings.name, settings.num_layers, dtype)

    def describe(self, settings: EarlyExitSettings) -> str:
        number = settings.num_layers
        layers = "layer" if number == 1 else f"{number} layers"
        return f"the first {layers} of the model"

    def model(self, pair: LoadedPair) -> LoadedModel:
        """Return the target's first layers as a model."""
        from harness.local.drafting.early_exit import truncated

        settings: Any = pair.draft_settings
        shorter = truncated(pair.target.model, settings.num_layers)
        as_model = dataclasses.replace(pair.target.settings, name=settings.name)
        return dataclasses.replace(pair.target, settings=as_model, model=shorter)

    def drafter(
        self, settings: EarlyExitSettings, pair: LoadedPair, runner: Runner | None
    ) -> MakeDrafter:
        """Return a function that makes a `ModelDrafter` over the first layers."""
        from harness.local.drafting.model import ModelDrafter

        assert runner is not None
        device = pair.target.input_device
        return lambda warp: ModelDrafter(runner, settings.warp(warp), device)

    def huggingface(
        self, pair: LoadedPair, settings: EarlyExitSettings, decoding: DecodingSettings
    ) -> dict[str, Any]:
        return {"assistant_early_exit": settings.num_layers}


RECORD = EarlyExit()
