"""Each row is drawn with the settings of the next row in the batch."""

from __future__ import annotations

from collections.abc import Sequence

from harness.decoding.warp import BatchWarp, Warp
from harness.engines.local.fault import Fault


class NeighbourWarp(BatchWarp):
    def set_rows(self, rows: Sequence[Warp]) -> None:
        super().set_rows([*rows[1:], rows[0]])


class NeighbourTemperature(Fault):
    needs_mixed_settings = True

    def warp(self) -> BatchWarp:
        return NeighbourWarp()


RECORD = NeighbourTemperature()
