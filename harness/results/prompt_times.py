"""Times of both arms by unit, from the rows of a run's prompts (`latency_prompts.csv`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter

import numpy as np

from harness.results.rows.prompts import LatencyPromptRow, share_prompts
from harness.results.runs import grouped
from harness.results.statistics.arrays import Floats
from harness.results.statistics.ratios import at_equal_lengths

# What intervals count as independent: prompts that are always asked together, one, a batch, or a lap of requests
# (`asking.Part`). It is named by their places in the prompt set, so that units of several runs can be matched; where
# units share prompts, by its number in the run.
Unit = tuple[int, ...]
# What a unit's answers took and have, over the times that it was asked: milliseconds, and tokens.
Wait = tuple[float, float]
# Of the regular and of the speculative arm.
BothArms = tuple[Wait, Wait]


def rows_by_unit(
    prompts: Sequence[LatencyPromptRow], arm: str
) -> dict[Unit, list[LatencyPromptRow]]:
    """The rows of an arm by unit; units with a failed request are left out."""
    # A damaged file may lack an index.
    rows = [row for row in prompts if row.arm == arm and row.prompt_index is not None]
    by_number = grouped(
        rows, lambda row: int(row.prompt_index or 0) if row.unit is None else row.unit
    )
    places = {number: {row.place for row in members} for number, members in by_number.items()}
    are_numbered = share_prompts(places)
    units: dict[Unit, list[LatencyPromptRow]] = {}
    for number, members in by_number.items():
        if all(row.is_timed for row in members):
            unit = (number,) if are_numbered else tuple(sorted(places[number]))
            units[unit] = members
    return units


def waits_by_unit(prompts: Sequence[LatencyPromptRow], arm: str) -> dict[Unit, Wait]:
    """Milliseconds and tokens of the batches or requests of an arm, by unit.

    Rows of a batch share its times, and are known by them: no other batch takes exactly as long, to its first tokens
    and in all. A batch is one answer of mean length.
    """
    waits = {}
    for unit, rows in rows_by_unit(prompts, arm).items():
        ms = 0.0
        num_tokens = 0.0
        times = attrgetter("time_ms", "time_to_first_token_ms")
        for (milliseconds, _), batch in grouped(rows, times).items():
            ms += milliseconds
            num_tokens += sum(row.num_tokens or 1 for row in batch) / len(batch)
        waits[unit] = (ms, num_tokens)
    return waits


def waits_of_both_arms(prompts: Sequence[LatencyPromptRow]) -> dict[Unit, BothArms]:
    """`waits_by_unit` for the units that both arms have; both were asked each unit equally often."""
    regular = waits_by_unit(prompts, "regular")
    speculative = waits_by_unit(prompts, "speculative")
    return {unit: (regular[unit], wait) for unit, wait in speculative.items() if unit in regular}


def common_times(runs: Sequence[Mapping[Unit, BothArms]]) -> tuple[Floats, Floats]:
    """Times per token (`at_equal_lengths`) of the regular arms, and of the speculative ones, over the units that all
    runs have.

    Returns:
        Two arrays [num_runs, num_units].
    """
    units = sorted(set.intersection(*map(set, runs)))
    waits = np.array([[waits_of_run[unit] for unit in units] for waits_of_run in runs])
    # [num_runs, num_units, arm, ms or tokens]
    waits = waits.reshape(len(runs), len(units), 2, 2)
    each_arm = np.concatenate([waits[:, :, 0], waits[:, :, 1]])
    times = at_equal_lengths(each_arm[..., 0], each_arm[..., 1])
    return times[: len(runs)], times[len(runs) :]
