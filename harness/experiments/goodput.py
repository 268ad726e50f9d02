"""Goodput: requests per second that were answered as fast as was asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness.engines.requests import RequestRecord
from harness.engines.timing import Generation
from harness.results.statistics.ratios import ratio_of_rates


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
    slo: Mapping[str, float],
    num_resamples: int,
    seed: int,
) -> dict[str, Any]:
    """The columns of both arms' ratio, with an interval over laps."""
    pairs = list(zip(regular, speculative, strict=False))
    first = [pair[0] for pair in pairs]
    second = [pair[1] for pair in pairs]
    found = ratio_of_rates(
        (_num_good(second, slo), [generation.seconds for generation in second]),
        (_num_good(first, slo), [generation.seconds for generation in first]),
        num_resamples,
        seed,
    )
    return found.columns("goodput_ratio", "goodput_ratio_low", "goodput_ratio_high")


def _num_good(generations: Sequence[Generation], slo: Mapping[str, float]) -> list[int]:
    return [
        sum(is_good(request, slo) for request in generation.requests) for generation in generations
    ]
