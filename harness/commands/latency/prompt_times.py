"""Times of both arms by unit, from the rows of a run's prompts (`latency_prompts.csv`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter

import numpy as np

from harness.commands.latency.rows import LatencyPromptRow
from harness.results.statistics.arrays import Floats
from harness.tables.table import grouped

# The places of the prompts of a unit in their set: of one, or of those of a batch or lap.
Unit = tuple[int, ...]
# Milliseconds per token of the regular and of the speculative arm.
BothArms = tuple[float, float]


def rows_by_unit(
    prompts: Sequence[LatencyPromptRow], arm: str
) -> dict[Unit, list[LatencyPromptRow]]:
    """The rows of an arm by unit; units with a failed request are left out."""
    rows = [row for row in prompts if row.arm == arm and row.prompt_index is not None]
    members = grouped(rows, lambda row: row.prompt_index if row.unit is None else row.unit)
    units = {}
    for of_unit in members.values():
        if all(row.is_timed for row in of_unit):
            units[tuple(sorted({row.place for row in of_unit}))] = of_unit
    return units


def ms_by_unit(prompts: Sequence[LatencyPromptRow], arm: str) -> dict[Unit, list[float]]:
    """Milliseconds per token of the batches or requests of an arm, by unit.

    Rows of a batch share its time, and are known by it: no other batch takes exactly as long.
    """
    times = {}
    for unit, rows in rows_by_unit(prompts, arm).items():
        times[unit] = [
            milliseconds * len(batch) / sum(row.num_tokens or 1 for row in batch)
            for milliseconds, batch in grouped(rows, attrgetter("time_ms")).items()
        ]
    return times


def ms_of_both_arms(prompts: Sequence[LatencyPromptRow]) -> dict[Unit, BothArms]:
    """The sums of `ms_by_unit` for the units that both arms have, as the run's own speed-up has them."""
    regular = ms_by_unit(prompts, "regular")
    speculative = ms_by_unit(prompts, "speculative")
    return {
        unit: (sum(regular[unit]), sum(times))
        for unit, times in speculative.items()
        if unit in regular
    }


def common_times(runs: Sequence[Mapping[Unit, BothArms]]) -> tuple[Floats, Floats]:
    """Times of the regular arms, and of the speculative ones, over the units that all runs have.

    Returns:
        Two arrays [num_runs, num_units].
    """
    units = sorted(set.intersection(*map(set, runs)))
    times = np.array([[of_run[unit] for unit in units] for of_run in runs])
    times = times.reshape(len(runs), len(units), 2)
    return times[..., 0], times[..., 1]
