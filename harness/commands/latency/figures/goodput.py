"""Goodput: requests per second that were answered within the latency limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness.engines.requests import RequestRecord
from harness.engines.timing import Generation
from harness.results.statistics.arrays import Floats
from harness.results.statistics.ratios import ratio_of_rates, totals_by_unit


def is_good(request: RequestRecord, slo: Mapping[str, float]) -> bool:
    """Return whether a request was answered within the limits.

    Args:
        slo: limits in milliseconds: `ttft_ms`, the time to the first token, and `itl_ms`, the mean
            time per later token of a request.
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
    """Return the columns of one arm: good requests per second, and their share."""
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
    """Return the columns of both arms' ratio, with an interval over laps.

    Args:
        units: the number of the lap that each generation measured; a lap that is asked again has
            the same number.
    """
    # A run that was stopped may have one generation more of one arm.
    num_generations = min(len(regular), len(speculative))

    def good_and_seconds(generations: Sequence[Generation]) -> tuple[Floats, Floats]:
        """Return the number of good requests, and the seconds, of each lap."""
        measured = generations[:num_generations]
        laps = units[:num_generations]
        seconds = [generation.seconds for generation in measured]
        return totals_by_unit(_num_good(measured, slo), laps), totals_by_unit(seconds, laps)

    ratio = ratio_of_rates(
        good_and_seconds(speculative), good_and_seconds(regular), num_resamples, seed
    )
    return {"goodput_ratio": ratio}


def _num_good(generations: Sequence[Generation], slo: Mapping[str, float]) -> list[int]:
    """The number of good requests of each generation."""
    counts = []
    for generation in generations:
        good = [request for request in generation.requests if is_good(request, slo)]
        counts.append(len(good))
    return counts
