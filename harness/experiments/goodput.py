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
    if not request.answered:
        return False
    times = {
        "ttft_ms": request.time_to_first_token_ms,
        "itl_ms": request.time_per_output_token_ms,
    }
    for name, most in slo.items():
        milliseconds = times[name]
        # An answer of one token has no time between tokens.
        if milliseconds is not None and milliseconds > most:
            return False
    return True


def goodput_columns(generations: Sequence[Generation], slo: Mapping[str, float]) -> dict[str, Any]:
    """The columns of one arm."""
    seconds = sum(generation.seconds for generation in generations)
    num_good = sum(_num_good(generations, slo))
    num_requests = sum(len(generation.requests) for generation in generations)
    if not seconds or not num_requests:
        return {}
    return {"goodput": num_good / seconds, "goodput_share": num_good / num_requests}


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
    # A run that was stopped may have one lap more of one arm.
    num_laps = min(len(regular), len(speculative))

    def good_and_seconds(generations: Sequence[Generation]) -> tuple[Floats, Floats]:
        """Good requests, and seconds, by lap."""
        laps = generations[:num_laps]
        seconds = [lap.seconds for lap in laps]
        units_of_laps = units[:num_laps]
        return (
            totals_by_unit(_num_good(laps, slo), units_of_laps),
            totals_by_unit(seconds, units_of_laps),
        )

    ratio = ratio_of_rates(
        good_and_seconds(speculative), good_and_seconds(regular), num_resamples, seed
    )
    return ratio.columns("goodput_ratio")


def _num_good(generations: Sequence[Generation], slo: Mapping[str, float]) -> list[int]:
    """The number of good requests of each generation."""
    counts = []
    for generation in generations:
        good = [request for request in generation.requests if is_good(request, slo)]
        counts.append(len(good))
    return counts
