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

    Two rows that take 2 s for 10 tokens each come at 10 tokens per second in all, and each of their
    two readers gets 5.

    Args:
        units: of each generation, the prompt, batch or lap that it measured.
    """
    units_answered: list[int] = []
    tokens: list[float] = []
    seconds: list[float] = []
    # Readers are the batches or requests of a generation, and a wait is the seconds per token of
    # one: tokens per second of a reader are 1 / the mean wait.
    num_readers: list[float] = []
    waits: list[float] = []
    for generation, unit in zip(generations, units, strict=False):
        if generation.times:
            answered = [request for request in generation.requests if request.answered]
            units_answered.append(unit)
            tokens.append(sum(request.num_tokens for request in answered))
            seconds.append(generation.seconds)
            num_readers.append(len(generation.times))
            waits.append(sum(generation.times.values()) / 1000)

    def rate(numerators: Sequence[float], denominators: Sequence[float]) -> Interval:
        numerator = totals_by_unit(numerators, units_answered)
        denominator = totals_by_unit(denominators, units_answered)
        return ratio_of_totals(numerator, denominator, num_resamples, seed)

    of_all = _ends("tokens_per_second", rate(tokens, seconds))
    of_a_reader = _ends("tokens_per_second_per_user", rate(num_readers, waits))
    return of_all | of_a_reader


def _ends(name: str, interval: Interval) -> dict[str, float | None]:
    columns = interval.columns(name)
    # The estimates are the arm's own columns.
    del columns[name]
    return columns
