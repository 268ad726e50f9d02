"""The times of both arms, paired by what is independent: a prompt, a batch, or a lap of requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from harness.engines.timing import Generation
from harness.results.statistics import power
from harness.results.statistics.interval import Floats, Interval
from harness.results.statistics.ratios import drift, ratio_of_totals, totals_by_unit
from harness.results.statistics.runs import ratio_over_runs


class PairedTimes(NamedTuple):
    """Milliseconds per token of both arms, [num_units] each, in the order measured.

    Attributes:
        unit: what a unit is called: `prompt`, `batch` or `lap`.
    """

    regular: Floats
    speculative: Floats
    unit: str

    def speedup(self, num_resamples: int, seed: int) -> Interval:
        """The ratio of both arms' total times, with a bootstrap interval over units."""
        return ratio_of_totals(self.regular, self.speculative, num_resamples, seed, unit=self.unit)


def paired_times(
    regular: Sequence[Generation],
    speculative: Sequence[Generation],
    units: Sequence[int] | None = None,
    *,
    decode_only: bool = False,
) -> PairedTimes:
    """Pair what both arms answered: rows of a batch share a time, requests of a lap are added up.

    Args:
        regular, speculative: answers to the same questions, in the same order; one may be missing.
        units: the unit of each question, where several are one: turns of the same conversations.
        decode_only: leave out the time until the first tokens, and these.
    """

    def times_of(generation: Generation) -> dict[int, float]:
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
        _unit(regular),
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
    columns: dict[str, Any] = found.change.columns("drift")
    return columns | {"drifted": found.matters}


def _unit(generations: Sequence[Generation]) -> str:
    if all(len(generation.requests) == 1 for generation in generations):
        return "prompt"
    return "lap" if any(generation.sent for generation in generations) else "batch"
