"""The times of both arms, paired by what is independent: a prompt, a batch, or a lap of requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from harness.engines.timing import Generation
from harness.results.statistics import power
from harness.results.statistics.arrays import Floats
from harness.results.statistics.interval import CONFIDENCE, Interval
from harness.results.statistics.ratios import (
    drift,
    ratio_of_totals,
    ratio_over_blocks,
    totals_by_unit,
)
from harness.results.statistics.runs import ratio_over_runs


class PairedTimes(NamedTuple):
    """Milliseconds per token of both arms, [num_units] each, in the order measured.

    Attributes:
        unit: what a unit is called: `prompt`, `batch`, `lap` or `block`.
    """

    regular: Floats
    speculative: Floats
    unit: str

    def speedup(self, num_resamples: int, seed: int, confidence: float = CONFIDENCE) -> Interval:
        """The ratio of both arms' total times, with a bootstrap interval over units, or
        Student's t over blocks.
        """
        if self.unit == "block":
            return ratio_over_blocks(self.regular, self.speculative, confidence)
        return ratio_of_totals(
            self.regular, self.speculative, num_resamples, seed, confidence, self.unit
        )


def paired_times(
    regular: Sequence[Generation],
    speculative: Sequence[Generation],
    units: Sequence[int] | None = None,
    *,
    decode_only: bool = False,
    in_blocks: bool = False,
) -> PairedTimes:
    """Pair what both arms answered: rows of a batch share a time, requests of a lap are added up.

    For example, prompts 0 to 3 are asked in two laps of two, and prompt 3 fails in one of the arms:

        times by prompt, regular        0: 20   1: 22   2: 21   3: 23
        times by prompt, speculative    0: 10   1: 12   2: 11
        regular [42, 21], speculative [22, 11]

    Args:
        regular, speculative: answers to the same questions, in the same order; of a run that was
            stopped, one arm may have an answer less.
        units: the unit of each question, where several are one: turns of the same conversations,
            or questions that are asked again. By default each is a unit.
        in_blocks: whether each question is a block, with a start of each arm.
        decode_only: leave out the time until the first tokens, and these.
    """

    def times_of(generation: Generation) -> dict[int, float]:
        """Milliseconds per token, by the index of the prompt or of the batch's first prompt."""
        return generation.decode_times if decode_only else generation.times

    speculative_ms: dict[int, float] = {}
    for generation in speculative:
        speculative_ms |= times_of(generation)
    units_of_pairs: list[int] = []
    regular_times: list[float] = []
    speculative_times: list[float] = []
    for number, generation in enumerate(regular):
        unit = number if units is None else units[number]
        for index, milliseconds in times_of(generation).items():
            if index in speculative_ms:
                units_of_pairs.append(unit)
                regular_times.append(milliseconds)
                speculative_times.append(speculative_ms[index])
    return PairedTimes(
        totals_by_unit(regular_times, units_of_pairs),
        totals_by_unit(speculative_times, units_of_pairs),
        "block" if in_blocks else _unit(regular),
    )


def reach_columns(times: PairedTimes) -> dict[str, Any]:
    """The columns about how small a difference would show."""
    if not times.regular.size:
        return {}
    return power.reach_columns(
        ratio_over_runs(times.regular[None], times.speculative[None], times.unit)
    )


def drift_columns(times: PairedTimes) -> dict[str, Any]:
    """The columns about a speed-up that changes within the run."""
    found = drift(times.regular, times.speculative, unit=times.unit)
    return {"drift": found.change, "drifted": found.matters}


def _unit(generations: Sequence[Generation]) -> str:
    """What one question is called."""
    if all(len(generation.requests) == 1 for generation in generations):
        return "prompt"
    return "lap" if any(generation.sent for generation in generations) else "batch"
