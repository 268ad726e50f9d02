"""Goodput: requests per second that were answered as fast as was asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness.engines.requests import RequestRecord
from harness.engines.timing import Generation
from harness.results.statistics.interval import Floats
from harness.results.statistics.ratios import ratio_of_rates, totals_by_unit


def is_good(request: RequestRecord, slo: Mapping[str, float]) -> bool:
    """Whether a request was answered, with its first token and its tokens after that in time.

    Args:
        slo: the most milliseconds, `ttft_ms` to the first token and `itl_ms` for each token after it,
            a mean of the request.
    """
    times = {
        "ttft_ms": request.time_to_first_token_ms,
        "itl_ms": request.time_per_output_token_ms,
    }
    if not request.answered:
        return False
    asked = ((times[name], most) for name, most in slo.items())
    # An answer of one token has no time between tokens.
    return all(time is None or time <= most for time, most in asked)


def goodput_columns(generations: Sequence[Generation], slo: Mapping[str, float]) -> dict[str, Any]:
    """The columns of one arm."""
    seconds = sum(generation.seconds for generation in generations)
    good = sum(_num_good(generations, slo))
    number = sum(len(generation.requests) for generation in generations)
    if not seconds or not number:
        return {}
    return {"goodput": good / seconds, "goodput_share": good / number}


def goodput_ratio_columns(
    regular: Sequence[Generation],
    speculative: Sequence[Generation],
    units: Sequence[int],
    slo: Mapping[str, float],
    num_resamples: int,
    seed: int,
) -> dict[str, Any]:
    """The columns of both arms' ratio, with an interval over laps.

    Args:
        units: the lap of each generation; a lap that is asked again is the same one.
    """
    number = min(len(regular), len(speculative))

    def rate(generations: Sequence[Generation]) -> tuple[Floats, Floats]:
        laps = generations[:number]
        seconds = [generation.seconds for generation in laps]
        return (
            totals_by_unit(_num_good(laps, slo), units[:number]),
            totals_by_unit(seconds, units[:number]),
        )

    found = ratio_of_rates(rate(speculative), rate(regular), num_resamples, seed)
    return found.columns("goodput_ratio", "goodput_ratio_low", "goodput_ratio_high")


def _num_good(generations: Sequence[Generation], slo: Mapping[str, float]) -> list[int]:
    return [
        sum(is_good(request, slo) for request in generation.requests) for generation in generations
    ]
