"""The rows of `map`: those of `latency`, for every cell of the grid."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from harness.measuring.rows import LatencyRow
from harness.results.row import figure, setting
from harness.results.schema import MaybeInt


@dataclass(frozen=True, kw_only=True)
class MapRow(LatencyRow):
    """`map.csv`: one row per cell of the grid and arm, in the order of K, context and batch size."""

    kind = "map"
    recognised_by = ("context", "arm", "ms_per_token", "speedup")

    context: MaybeInt = setting(
        "length to which the prompts of a cell were cut; empty where they were not", unit="tokens"
    )
    # It follows from the load.
    laps: int | Literal["auto"] | None = figure("how often the arms of the cell took turns")

    @property
    def questions_in_words(self) -> str | None:
        """Their number follows from the load, too."""
        return f"prompts ({self.prompts})" if self.prompts else ""
