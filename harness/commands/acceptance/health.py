"""Columns about texts that both models of a pair have read: how likely they are, and whether the engine that wrote them
accepted what the weights do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from harness.engines.door.reading import ReadText
from harness.engines.requests import RequestRecord
from harness.results.statistics.interval import Interval

Health = Literal["as its weights say", "accepts less", "accepts more", "other texts", "cannot tell"]
# The share of tokens that a model cannot draw, which rounding and ties explain.
MOST_IMPOSSIBLE = 0.005
# Standard deviations by which the log-probability of a model's own texts, or the number of iterations, may differ from
# the expected one. Chance alone exceeds them, in either direction, twice in a million.
MOST_DEVIATIONS = 4.75
# What rounding and ties may change, as a share of the tokens per iteration.
_TOLERATED_ROUNDING = 0.03


def likelihood_columns(texts: Sequence[ReadText]) -> dict[str, Any]:
    """How likely texts are under the target, against its own texts."""
    num_tokens = sum(text.num_tokens for text in texts)
    num_impossible = sum(text.num_impossible for text in texts)
    num_possible = num_tokens - num_impossible
    found = sum(text.log_probability for text in texts)
    expected = sum(text.expected for text in texts)
    deviation = math.sqrt(sum(text.variance for text in texts))
    return {
        "log_probability": found / num_possible if num_possible else None,
        "own_log_probability": expected / num_possible if num_possible else None,
        "likelihood_z": (found - expected) / deviation if deviation else None,
        "impossible_share": num_impossible / num_tokens,
    }


def most_drafted(requests: Sequence[RequestRecord]) -> int | None:
    """The K that an engine reports with its answers; None where it does not."""
    return max((k for request in requests for k, _ in request.outcomes), default=None)


def health_columns(
    readings: Mapping[str, Sequence[ReadText]],
    requests: Sequence[RequestRecord],
    num_draft_tokens: int,
) -> dict[str, Any]:
    """Whether an engine accepted what the weights of its models do.

    Args:
        readings: its answers, read by the weights, by the way in which the draft is taken to propose: `""` is as its
            settings say, `greedy` its likeliest tokens. The first one gives the figures, but where another explains
            what the engine does.
        requests: the same answers.
        num_draft_tokens: the K that it drafts with.
    """
    first = next(iter(readings.values()))
    likelihood = likelihood_columns(first)
    is_own = abs(likelihood["likelihood_z"] or 0.0) <= MOST_DEVIATIONS
    expected = {
        sampling: _expected(texts, num_draft_tokens) for sampling, texts in readings.items()
    }
    num_tokens = sum(text.cut.num_tokens for text in first)
    counted = _reported_iterations(requests)
    served = num_tokens / counted if counted else _tokens_in_burst(requests)
    explaining = [
        sampling
        for sampling, tokens in expected.items()
        if served is not None and not tokens.excludes(served)
    ]
    sampling = explaining[0] if explaining else next(iter(readings))
    weights = expected[sampling]
    health: Health
    if not is_own or likelihood["impossible_share"] > MOST_IMPOSSIBLE:
        health = "other texts"
    elif explaining:
        health = "as its weights say"
    elif counted is None or served is None:
        health = "cannot tell"
    else:
        health = "accepts less" if served < weights.estimate else "accepts more"
    columns = {
        "health": health,
        "served_tokens_per_iteration": served,
        "weights_tokens_per_iteration": weights,
    }
    return columns | ({"draft_sampling": sampling} if sampling else {})


def _expected(texts: Sequence[ReadText], num_draft_tokens: int) -> Interval:
    """Tokens per iteration of these texts, in limits that an engine with these weights exceeds twice in a million."""
    place = num_draft_tokens - 1
    num_tokens = sum(text.cut.num_tokens for text in texts)
    iterations = sum(float(text.cut.iterations[place]) for text in texts)
    variance = sum(float(text.cut.variance[place]) for text in texts)
    spread = MOST_DEVIATIONS * math.sqrt(variance)
    return Interval(
        num_tokens / iterations,
        num_tokens / (iterations + spread) * (1 - _TOLERATED_ROUNDING),
        num_tokens / max(iterations - spread, 1.0) * (1 + _TOLERATED_ROUNDING),
    )


def _reported_iterations(requests: Sequence[RequestRecord]) -> int | None:
    """How many iterations the engine reported; None where those of an answer are unknown."""
    counted = 0
    for request in requests:
        is_reported = request.outcomes or request.num_drafted is not None
        number = request.num_iterations
        if number is None or not is_reported:
            return None
        counted += number
    return counted


def _tokens_in_burst(requests: Sequence[RequestRecord]) -> float | None:
    """Tokens that arrive together after the first ones; None where all come one by one, or at once."""
    bursts = sum(len(request.bursts) - 1 for request in requests)
    tokens = sum(request.num_tokens - 1 for request in requests)
    return tokens / bursts if 0 < bursts < tokens else None
