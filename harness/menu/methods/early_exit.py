"""Early exit: the target's own first layers draft, with its norm and head."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.config.settings import require
from harness.menu.method import MakeDrafter, Method
from harness.menu.methods.model import DrawnSettings

if TYPE_CHECKING:
    from harness.drafting.plan import DraftPlan


@dataclass(frozen=True, kw_only=True)
class EarlyExitSettings(DrawnSettings):
    """Settings of `draft=early_exit`; `draft=early_exit_8` has 8 layers.

    Attributes:
        layers: how many of the target's layers draft; a quarter of them if None.
    """

    layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = "must be one number, of the target's layers that draft"
        require(self.layers is None or len(self.layers) == 1, "layers", rule, self.layers)


class EarlyExit(Method):
    """The first layers of the target as a draft model without weights of its own."""

    name = "early_exit"
    summary = "the target's own first layers, a quarter of them; early_exit_8 has 8"
    settings = EarlyExitSettings
    memory = "shared"
    follows = True

    def choice(self, name: str) -> dict[str, Any] | None:
        """See `Method.choice`: `early_exit_8`."""
        if found := re.fullmatch(r"early_exit_(\d+)", name):
            return {"layers": [int(found[1])]}
        return super().choice(name)

    def plan(self, settings: EarlyExitSettings, target: Any, read: Any, weights: bool) -> DraftPlan:
        """See `Method.plan`; the number of layers is known from here on."""
        from harness.drafting.early_exit import num_layers
        from harness.drafting.plan import DraftPlan

        layers = (num_layers(settings.layers, target.config),)
        return DraftPlan(dataclasses.replace(settings, layers=layers))

    def sketch(self, plan: Any, target: Any, dtype: Any) -> Any:
        """See `Method.sketch`."""
        from harness.drafting.early_exit import exit_sketch

        return exit_sketch(target, plan.settings, plan.settings.layers[0], dtype)

    def describe(self, settings: EarlyExitSettings) -> str:
        """See `Method.describe`."""
        assert settings.layers is not None
        return f"the first {settings.layers[0]} layers of the model"

    def model(self, pair: Any) -> Any:
        """See `Method.model`."""
        from harness.drafting.early_exit import truncated

        shorter = truncated(pair.target.model, pair.drafting.layers[0])
        return dataclasses.replace(pair.target, settings=pair.drafting, model=shorter)

    def warp(self, settings: EarlyExitSettings, pair: Any, of_target: Any) -> Any:
        """See `Method.warp`."""
        return settings.warp(of_target)

    def drafter(self, settings: EarlyExitSettings, pair: Any, runner: Any) -> MakeDrafter:
        """See `Method.drafter`."""
        from harness.drafting.model import ModelDrafter

        device = pair.target.input_device
        return lambda warp: ModelDrafter(runner, settings.warp(warp), device)

    def huggingface(self, pair: Any, settings: EarlyExitSettings, decoding: Any) -> dict[str, Any]:
        """See `Method.huggingface`."""
        assert settings.layers is not None
        return {"assistant_early_exit": settings.layers[0]}

    def check_huggingface(self, planned: Any, settings: Any, schedule: str) -> None:
        """See `Method.check_huggingface`."""


RECORD = EarlyExit()
