"""The rows of `map`: those of `latency`, for every cell of the grid."""

from __future__ import annotations

from dataclasses import dataclass

from harness.measuring.rows import LatencyRow
from harness.results.row import figure
from harness.results.schema import MaybeInt


@dataclass(frozen=True, kw_only=True)
class MapRow(LatencyRow):
    """`map.csv`: one row per cell of the grid and arm, in the order of K, context and batch size."""

    kind = "map"
    recognised_by = ("context", "arm", "ms_per_token", "speedup")

    context: MaybeInt = figure(
        "length to which the prompts of a cell were cut; empty where they were not", "tokens"
    )
