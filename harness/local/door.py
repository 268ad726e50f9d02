"""What this wing offers the instrument (`engines/door.py`). Imports are inside the calls: most are slow."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Literal

from harness.engines.door import LocalWing

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


class Wing(LocalWing):
    def load_tokenizer(self, model: ModelSettings) -> Tokenizer:
        from harness.local.models.quiet import quiet_libraries
        from harness.local.models.tokenizers import load_tokenizer

        quiet_libraries(loads_weights=False)
        return load_tokenizer(model)

    def plan_pair(
        self,
        target: ModelSettings,
        draft: DraftSettings | None,
        placement: PlacementSettings,
        dtype: Dtype = "auto",
        *,
        weights: Weights = "stored",
    ) -> PlannedPair:
        from harness.local.engine.pair import plan_pair

        return plan_pair(target, draft, placement, dtype, weights=weights)

    def open_reference(
        self, pair: Pair, preparation: Preparation, never_drawn: Collection[int] = ()
    ) -> Reference:
        from harness.local.engine.pair import Pair
        from harness.local.engine.reference import open_reference

        assert isinstance(pair, Pair)
        return open_reference(pair, preparation, never_drawn)

    def release_memory(self, devices: Sequence[Any]) -> None:
        from harness.local.runners.graphs import release_memory

        release_memory(devices)

    def capture_has_failed(self) -> bool:
        from harness.local.runners.graphs import GraphRecorder

        return GraphRecorder.has_failed

    def check_hub_access(
        self, repository: str, file: str, revision: str | None, kind: Literal["model", "dataset"]
    ) -> None:
        from harness.local.models.checkpoints import check_hub_access

        check_hub_access(repository, file, revision, kind)


WING = Wing()
