"""Texts under the target, and what the engine that wrote them accepted beside what the weights do: columns and rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from harness.engines.door.reading import ReadText
from harness.engines.requests import RequestRecord
from harness.measuring.acceptance import tokens_in_burst
from harness.results.acceptance import Acceptance
from harness.results.judging.acceptance import MOST_DEVIATIONS, MOST_IMPOSSIBLE
from harness.results.statistics.interval import Interval
from harness.results.statistics.proportions import wilson_interval

# What rounding and ties may change, as a share of the tokens per iteration.
_TOLERATED_ROUNDING = 0.03
# Of a draft token that is not used.
_NEVER = Interval(0.0, 0.0, 0.0)
# Tokens in a row that repeat earlier ones.
_REPEATED_TOKENS = 4


class Place(NamedTuple):
    """Iterations that tested the draft token at a position, and those that accepted it."""

    tested: float
    accepted: float


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


def are_own(texts: Sequence[ReadText]) -> bool:
    """Whether texts are as likely under the target as its own."""
    likelihood = likelihood_columns(texts)
    is_likely = abs(likelihood["likelihood_z"] or 0.0) <= MOST_DEVIATIONS
    return bool(is_likely and likelihood["impossible_share"] <= MOST_IMPOSSIBLE)


def repeated_share(texts: Sequence[Sequence[int]]) -> float | None:
    """The share of the texts' tokens that end several which the text had before."""
    num_tokens = sum(map(len, texts))
    num_repeated = 0
    for text in texts:
        ends = range(_REPEATED_TOKENS, len(text) + 1)
        before: set[tuple[int, ...]] = set()
        for end in ends:
            last = tuple(text[end - _REPEATED_TOKENS : end])
            num_repeated += last in before
            before.add(last)
    return num_repeated / num_tokens if num_tokens else None


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


def served_columns(
    texts: Sequence[ReadText], requests: Sequence[RequestRecord], num_draft_tokens: int
) -> dict[str, Any]:
    """What an engine accepted, and what the weights of its models accept of the same answers.

    Args:
        texts: its answers, read by the weights.
        requests: the same answers.
        num_draft_tokens: the K that it drafts with.
    """
    num_tokens = sum(text.cut.num_tokens for text in texts)
    num_iterations = _reported_iterations(requests)
    counted = num_tokens / num_iterations if num_iterations else None
    together = tokens_in_burst(requests)
    # None where tokens come one by one, or all at once.
    arrived = together if together > 1 else None
    weights = expected_tokens(texts, num_draft_tokens)
    why = None
    if not are_own(texts):
        why = "the texts are not the model's"
    elif counted is None and (arrived is None or weights.excludes(arrived)):
        why = "the engine does not report what it accepted"
    elif counted is not None and counted < weights.low and num_iterations:
        is_short = _drafts_fewer(requests, num_iterations, num_draft_tokens)
        why = f"the engine drafts fewer than K={num_draft_tokens}" if is_short else None
    return {
        "served_tokens_per_iteration": counted,
        "arrived_tokens_per_iteration": arrived,
        "weights_tokens_per_iteration": weights,
        "engine_unknown": why,
    }


def position_rows(
    texts: Sequence[ReadText],
    requests: Sequence[RequestRecord],
    num_used: int,
    num_draft_tokens: int,
) -> list[dict[str, Any]]:
    """Columns of rows about tokens per iteration, and about each draft position, by the engine and by the weights.

    Args:
        texts: read by the weights; none where these are not here.
        requests: the same answers, by the engine; none where nobody else wrote them.
        num_used: draft tokens that the weights are taken to use, of the K of the engine.
    """
    num_iterations = _reported_iterations(requests)
    served = Interval()
    if num_iterations:
        served = Interval(sum(request.num_tokens - 1 for request in requests) / num_iterations)
    weights = expected_tokens(texts, num_used) if texts else None
    rows: list[dict[str, Any]] = [{"served": served, "weights": weights}]
    counted = _places(requests, num_draft_tokens)
    for position in range(num_draft_tokens):
        row: dict[str, Any] = {"position": position + 1}
        tested = math.inf
        if counted:
            tested, accepted = counted[position]
            row["served"] = wilson_interval(round(accepted), round(tested))
        if texts:
            is_used = position < num_used
            expected = _expected_at(texts, num_used, position, tested) if is_used else _NEVER
            row["weights"] = expected
        rows.append(row)
    return rows


def _places(requests: Sequence[RequestRecord], num_draft_tokens: int) -> list[Place]:
    """What an engine counted at each draft position; [] where it does not report positions."""
    outcomes = [outcome for request in requests for outcome in request.outcomes]
    if outcomes:
        by_iteration = Acceptance.of(outcomes)
        return [
            Place(by_iteration.num_tested_at(place), by_iteration.num_accepted_at(place))
            for place in range(num_draft_tokens)
        ]
    drafts = [request.drafts for request in requests if request.drafts is not None]
    if not drafts or not all(counts.accepted_at and counts.iterations for counts in drafts):
        return []
    accepted = np.zeros(num_draft_tokens)
    for counts in drafts:
        at_positions = np.array(counts.accepted_at[:num_draft_tokens])
        accepted[: len(at_positions)] += at_positions
    tested = [float(sum(counts.iterations or 0 for counts in drafts)), *accepted]
    return [Place(*place) for place in zip(tested, accepted, strict=False)]


def _drafts_fewer(
    requests: Sequence[RequestRecord], num_iterations: int, num_draft_tokens: int
) -> bool:
    """Whether an engine drafts fewer than K tokens in some iterations that are not the last ones of an answer."""
    num_drafted = sum(request.draft_tokens[0] for request in requests)
    # At its end an answer lacks at most K, K - 1, ... and 1 of them.
    most_lost = len(requests) * num_draft_tokens * (num_draft_tokens + 1) / 2
    return 0 < num_drafted < num_iterations * num_draft_tokens - most_lost


def expected_tokens(texts: Sequence[ReadText], num_draft_tokens: int) -> Interval:
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


def _expected_at(
    texts: Sequence[ReadText], num_draft_tokens: int, position: int, num_tested: float
) -> Interval:
    """The share of the tested draft tokens that is accepted at a position, in such limits for that many tests."""
    index = num_draft_tokens - 1
    tested = sum(float(text.cut.tested_at[index, position]) for text in texts)
    accepted = sum(float(text.cut.accepted_at[index, position]) for text in texts)
    if not tested:
        return Interval()
    # Not 0 or 1, whose deviation is none.
    share = (accepted + 1) / (tested + 2)
    spread = MOST_DEVIATIONS * math.sqrt(share * (1 - share) / max(min(num_tested, tested), 1.0))
    low = max(0.0, (accepted / tested - spread) * (1 - _TOLERATED_ROUNDING))
    high = min(1.0, (accepted / tested + spread) * (1 + _TOLERATED_ROUNDING))
    return Interval(accepted / tested, low, high)


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
