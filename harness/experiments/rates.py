"""Tokens per second of an arm, in all and of one reader, with intervals over prompts or laps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.engines.timing import Generation
from harness.results.statistics.interval import Interval
from harness.results.statistics.ratios import ratio_of_totals, totals_by_unit


def rate_columns(
    generations: Sequence[Generation], units: Sequence[int], num_resamples: int, seed: int
) -> dict[str, Any]:
    """The ends of both intervals; None where there are too few units.

    Args:
        units: the unit of each generation.
    """
    answered = [
        (generation, unit)
        for generation, unit in zip(generations, units, strict=False)
        if generation.times
    ]
    of_generations = [unit for _, unit in answered]

    def rate(tops: Sequence[float], bottoms: Sequence[float]) -> Interval:
        totals = totals_by_unit(tops, of_generations)
        of = totals_by_unit(bottoms, of_generations)
        return ratio_of_totals(totals, of, num_resamples, seed)

    tokens = [
        sum(request.num_tokens for request in generation.requests if request.answered)
        for generation, _ in answered
    ]
    seconds = [generation.seconds for generation, _ in answered]
    # A reader gets a token in so many seconds, on average over batches or requests.
    num_readers = [len(generation.times) for generation, _ in answered]
    waits = [sum(generation.times.values()) / 1000 for generation, _ in answered]
    return _ends("tokens_per_second", rate(tokens, seconds)) | _ends(
        "tokens_per_second_per_user", rate(num_readers, waits)
    )


def _ends(name: str, interval: Interval) -> dict[str, float | None]:
    columns = interval.columns(name, f"{name}_low", f"{name}_high")
    # The estimates are the arm's own columns.
    del columns[name]
    return columns
