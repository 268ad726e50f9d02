"""Columns about texts that both models of a pair have read: how likely they are, and whether the engine that wrote them
accepted what the weights do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from harness.engines.door.reading import ReadText
from harness.engines.requests import RequestRecord
from harness.results.verdict import MOST_DEVIATIONS, MOST_IMPOSSIBLE, drafter_health


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
    texts: Sequence[ReadText], requests: Sequence[RequestRecord], num_draft_tokens: int
) -> dict[str, Any]:
    """Whether an engine accepted what the weights of its models do.

    Args:
        texts: its answers, read by the weights.
        requests: the same answers.
        num_draft_tokens: the K that it drafts with.
    """
    reported = []
    for request, text in zip(requests, texts, strict=True):
        if request.outcomes:
            reported.append(len(request.outcomes))
        elif request.num_accepted is not None:
            reported.append(text.cut.num_tokens - request.num_accepted)
    counted = sum(reported) if len(reported) == len(texts) else None
    place = num_draft_tokens - 1
    num_tokens = sum(text.cut.num_tokens for text in texts)
    likelihood = likelihood_columns(texts)
    health, allowed = drafter_health(
        num_tokens,
        counted,
        expected=sum(text.cut.iterations[place] for text in texts),
        variance=sum(text.cut.variance[place] for text in texts),
        own_texts=abs(likelihood["likelihood_z"] or 0.0) <= MOST_DEVIATIONS
        and likelihood["impossible_share"] <= MOST_IMPOSSIBLE,
    )
    return {
        "health": health,
        "served_tokens_per_iteration": num_tokens / counted if counted else None,
        "weights_tokens_per_iteration": allowed,
    }
