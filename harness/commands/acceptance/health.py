"""How likely texts are under the target, and whether the engine that wrote them accepted what the weights do: columns,
and sentences about them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from harness.config.amounts import percent
from harness.engines.door.reading import ReadText
from harness.engines.requests import RequestRecord
from harness.measuring.acceptance import tokens_in_burst
from harness.results.judging.health import Health, health_of, why_unknown
from harness.results.rows.acceptance import AcceptanceRow
from harness.results.statistics.interval import Interval

# The share of tokens that a model cannot draw, which rounding and ties explain.
MOST_IMPOSSIBLE = 0.005
# Standard deviations by which the log-probability of a model's own texts, or the number of iterations, may differ from
# the expected one. Chance alone exceeds them, in either direction, twice in a million.
MOST_DEVIATIONS = 4.75
# What rounding and ties may change, as a share of the tokens per iteration.
_TOLERATED_ROUNDING = 0.03


_CAUSES = {
    "accepts less": " than rejection sampling would (another rule, or a damaged draft)",
    "accepts more": " than a lossless rule would (another rule, or another draft)",
}


def likelihood_columns(texts: Sequence[ReadText]) -> dict[str, Any]:
    """How likely texts are under the target, against its own texts."""
    num_tokens = sum(text.num_tokens for text in texts)
    num_impossible = sum(text.num_impossible for text in texts)
    num_possible = num_tokens - num_impossible
    log_probability = sum(text.log_probability for text in texts)
    expected = sum(text.expected for text in texts)
    deviation = math.sqrt(sum(text.variance for text in texts))
    return {
        "log_probability": log_probability / num_possible if num_possible else None,
        "own_log_probability": expected / num_possible if num_possible else None,
        "likelihood_z": (log_probability - expected) / deviation if deviation else None,
        "impossible_share": num_impossible / num_tokens,
    }


def drafted_k(requests: Sequence[RequestRecord], typed: int | None) -> int | None:
    """The K of an engine: as it reports iterations, as it was started, or as totals show it; None where none does."""
    reported = max((k for request in requests for k, _ in request.outcomes), default=None)
    means = [
        request.draft_tokens[0] / request.num_iterations
        for request in requests
        if request.num_iterations
    ]
    # Fewer are drafted where an answer ends.
    return reported or typed or math.ceil(max(means, default=0))


def health_columns(
    texts: Sequence[ReadText], requests: Sequence[RequestRecord], num_draft_tokens: int
) -> dict[str, Any]:
    """Whether an engine accepted what the weights of its models do.

    Args:
        texts: its answers, read by the weights.
        requests: the same answers.
        num_draft_tokens: the K that it drafts with.
    """
    likelihood = likelihood_columns(texts)
    is_likely = abs(likelihood["likelihood_z"] or 0.0) <= MOST_DEVIATIONS
    weights = _expected(texts, num_draft_tokens)
    num_tokens = sum(text.cut.num_tokens for text in texts)
    num_iterations = _reported_iterations(requests)
    together = tokens_in_burst(requests)
    # None where tokens come one by one, or all at once.
    served = together if together > 1 else None
    if num_iterations:
        served = num_tokens / num_iterations
    is_possible = likelihood["impossible_share"] <= MOST_IMPOSSIBLE
    health: Health = health_of(
        served,
        weights,
        is_counted=num_iterations is not None,
        is_likely=is_likely and is_possible,
    )
    if health == "accepts less" and _drafts_fewer(requests, num_iterations or 0, num_draft_tokens):
        health = "cannot tell"
    return {
        "health": health,
        "served_tokens_per_iteration": served,
        "weights_tokens_per_iteration": weights,
    }


def _drafts_fewer(
    requests: Sequence[RequestRecord], num_iterations: int, num_draft_tokens: int
) -> bool:
    """Whether an engine drafts fewer than K tokens in some iterations that are not the last ones of an answer."""
    num_drafted = sum(request.draft_tokens[0] for request in requests)
    # At its end an answer lacks at most K, K - 1, ... and 1 of them.
    most_lost = len(requests) * num_draft_tokens * (num_draft_tokens + 1) / 2
    return 0 < num_drafted < num_iterations * num_draft_tokens - most_lost


def _expected(texts: Sequence[ReadText], num_draft_tokens: int) -> Interval:
    """Tokens per iteration of these texts, in limits that an engine with these weights exceeds twice in a million."""
    index = num_draft_tokens - 1
    num_tokens = sum(text.cut.num_tokens for text in texts)
    iterations = sum(float(text.cut.iterations[index]) for text in texts)
    variance = sum(float(text.cut.variance[index]) for text in texts)
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
        is_reported = request.outcomes or request.drafts is not None
        number = request.num_iterations
        if number is None or not is_reported:
            return None
        counted += number
    return counted


def health_in_words(row: AcceptanceRow) -> str:
    """`as its weights say: the engine decides 3.96 tokens per iteration at K=4, its weights 4.05 (3.80 to 4.31)`."""
    allowed = row.weights_tokens_per_iteration
    weights = f"{allowed or Interval():.2f}"
    if row.health == "cannot tell":
        return f"cannot tell: {why_unknown(row)}; its weights decide {weights} tokens"
    if row.health == "other texts":
        return f"the engine's texts are not {row.model}'s: {off_policy(row)}"
    served = f"{row.served_tokens_per_iteration or 0:.2f} tokens per iteration at K={row.num_draft_tokens}"
    figures = f"the engine decides {served}, its weights {weights}"
    return f"{row.health}{_CAUSES.get(row.health or '', '')}: {figures}"


def off_policy(row: AcceptanceRow) -> str | None:
    """How unlikely the texts are under the target; None where they are as likely as its own."""
    served = row.log_probability
    expected = row.own_log_probability
    impossible = row.impossible_share or 0.0
    parts = []
    if (
        abs(row.likelihood_z or 0.0) > MOST_DEVIATIONS
        and served is not None
        and expected is not None
    ):
        parts.append(f"{-served:.2f} nats per token where its own have {-expected:.2f}")
    if impossible > MOST_IMPOSSIBLE:
        parts.append(f"{percent(impossible, 1)} of their tokens it cannot draw")
    if not parts:
        return None
    return f"Not {row.model}'s own texts at this temperature: {'; '.join(parts)}"
