"""The door to the other wing: all that the instrument may ask of models that run in this process.

Nothing else in the instrument reaches `harness.local`, for types included. `harness/local/door.py` answers; built-in
methods, faults and engines of that wing are found by registries, through the names of their modules.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

from harness.config.packages import require_local

if TYPE_CHECKING:
    from harness.config.run import Weights
    from harness.config.settings import (
        DraftSettings,
        Dtype,
        ModelSettings,
        PlacementSettings,
    )
    from harness.engines.pairs import Pair, PlannedPair
    from harness.engines.protocol import Reference
    from harness.engines.record import Preparation
    from harness.engines.tokenizer import Tokenizer


class LocalWing(Protocol):
    """What the wing with the models offers. Each call imports what it needs."""

    def load_tokenizer(self, model: ModelSettings) -> Tokenizer:
        """The tokenizer of a model; torch is not imported where the tokenizer does not need it.

        Raises:
            SettingError, RunError: it is absent, gated or out of reach.
        """

    def plan_pair(
        self,
        target: ModelSettings,
        draft: DraftSettings | None,
        placement: PlacementSettings,
        dtype: Dtype = "auto",
        *,
        weights: Weights = "stored",
    ) -> PlannedPair:
        """Check everything about a pair that can be checked before its weights load.

        Args:
            weights: `random` needs no stored weights and no tokenizer: text is read byte by byte.

        Raises:
            SettingError: a setting that cannot hold for these models.
            RunError: a repository out of reach, a library that is missing or fails.
        """

    def open_reference(
        self, pair: Pair, preparation: Preparation, never_drawn: Collection[int] = ()
    ) -> Reference:
        """The probabilities of a loaded pair, by eager runners beside those of an engine.

        Args:
            never_drawn: tokens that the engine under test never draws.
        """

    def release_memory(self, devices: Sequence[Any]) -> None:
        """Give memory that is no longer used back to the GPUs among the devices."""

    def capture_has_failed(self) -> bool:
        """Whether the capture of a CUDA graph failed, after which this process should not go on."""

    def check_hub_access(
        self, repository: str, file: str, revision: str | None, kind: Literal["model", "dataset"]
    ) -> None:
        """Ask the hub once for a repository whose file was never downloaded; raise its refusal."""


def local(setting: str | None = None, value: object = ...) -> LocalWing:
    """The other wing.

    Args:
        setting, value: what needs models here, where no check of the run has asked for the packages before
            (`EngineRecord.check_installed`).

    Raises:
        SettingError: packages are missing.
    """
    if setting is not None:
        require_local(setting, value)
    wing: LocalWing = importlib.import_module("harness.local.door").WING
    return wing
