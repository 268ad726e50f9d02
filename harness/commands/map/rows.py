"""The rows of `map`: one per cell of the grid."""

from __future__ import annotations

from dataclasses import dataclass

from harness.results.row import figure, setting
from harness.results.schema import ComparedRow, MaybeFloat, MaybeInt, MaybeText


@dataclass(frozen=True, kw_only=True)
class MapRow(ComparedRow):
    """`map.csv`: one row per cell of the grid."""

    kind = "map"
    filled_if_measured = ("speedup", "regular_ms_per_token")
    recognised_by = ("context", "regular_ms_per_token", "speedup")

    seed: MaybeInt = setting("seed of the random numbers", "seed")
    context: MaybeInt = figure("mean length of the prompts", "tokens")
    regular_ms_per_token: MaybeFloat = figure("time per token of the regular arm", "ms")
    speculative_ms_per_token: MaybeFloat = figure("the same of the speculative arm", "ms")
    prompts: MaybeText = setting("name of the prompt set", "prompts.name")
