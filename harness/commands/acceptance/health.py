"""Columns about texts that both models of a pair have read: how likely they are, and whether the engine that wrote them
accepted what the weights do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from harness.engines.door.reading import ReadText
from harness.engines.requests import RequestRecord
from harness.results.statistics.served_rules import (
    MOST_IMPOSSIBLE,
    RuleFit,
    RuleName,
    expected_by_rule,
)

Health = Literal["as its weights say", "another rule", "broken", "other texts", "cannot tell"]
# Standard deviations by which the log-probability of a model's own texts may differ from the expected one. Of tokens
# that it cannot draw `MOST_IMPOSSIBLE` may be there.
MOST_DEVIATIONS = 4.75


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
    expected: RuleName,
) -> dict[str, Any]:
    """Whether an engine accepted what the weights of its models do, and by which rule.

    Args:
        readings: its answers, read by the weights, by the way in which the draft is taken to propose: `""` is as its
            settings say, `greedy` its likeliest tokens. The first one gives the figures, but where another explains
            what the engine does.
        requests: the same answers.
        num_draft_tokens: the K that it drafts with.
        expected: the rule that it is said to have.
    """
    first = next(iter(readings.values()))
    likelihood = likelihood_columns(first)
    is_own = abs(likelihood["likelihood_z"] or 0.0) <= MOST_DEVIATIONS
    own_texts = is_own and likelihood["impossible_share"] <= MOST_IMPOSSIBLE
    fits = {
        sampling: expected_by_rule(
            [text.probabilities for text in texts], num_draft_tokens, own_texts=own_texts
        )
        for sampling, texts in readings.items()
    }
    num_tokens = sum(text.cut.num_tokens for text in first)
    counted = _reported_iterations(requests)
    served = num_tokens / counted if counted else _tokens_in_burst(requests)
    explaining = [
        (sampling, fit)
        for sampling, of_reading in fits.items()
        for fit in of_reading
        if served is not None and fit.explains(served)
    ]
    # The rule that it is said to have first: others may do nearly the same.
    explaining.sort(key=lambda found: found[1].rule != expected)
    health: Health
    if explaining and explaining[0][1].rule == expected:
        health = "as its weights say"
    elif not own_texts and not (counted and explaining):
        health = "other texts"
    elif counted is None:
        health = "cannot tell"
    else:
        health = "another rule" if explaining else "broken"
    sampling = explaining[0][0] if explaining else next(iter(readings))
    allowed = next(fit for fit in fits[sampling] if fit.rule == expected)
    columns = {
        "health": health,
        "served_tokens_per_iteration": served,
        "weights_tokens_per_iteration": allowed.tokens_per_iteration,
        "served_rule": " or ".join(_in_words(*found) for found in explaining) or None,
        "rules": "; ".join(
            f"{_in_words(sampling, fit)} {fit.tokens_per_iteration.estimate:.2f}"
            for sampling, of_reading in fits.items()
            for fit in of_reading
        ),
    }
    return columns | ({"draft_sampling": sampling} if sampling else {})


def _in_words(sampling: str, fit: RuleFit) -> str:
    return f"{fit.rule}, {sampling} drafts" if sampling else fit.rule


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
