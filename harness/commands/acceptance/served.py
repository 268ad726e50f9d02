"""Texts under the target, and what the engine that wrote them accepted beside what the weights do: columns and rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

from harness.engines.door.reading import ReadText
from harness.engines.requests import RequestRecord
from harness.measuring.acceptance import tokens_in_burst
from harness.results.drafts import Drafts
from harness.results.judging.acceptance import MOST_DEVIATIONS, texts_statement
from harness.results.rows.acceptance import AcceptanceRow
from harness.results.statistics.interval import Interval
from harness.results.statistics.iterations import Cut

# The engine may be twice as far from the weights as two ways of reading them are apart.
_ROUNDING_ALLOWANCE = 2.0
# Of the iterations of an answer, at least: engines differ in how they draft at its end, and a tie may fall either way.
_LEAST_VARIANCE = 0.25
# Tokens in a row that repeat earlier ones.
_REPEATED_TOKENS = 4


class Share(NamedTuple):
    """Tokens over the iterations that decided them, or accepted draft tokens over the tested ones at one place."""

    part: float
    whole: float

    @classmethod
    def total(cls, shares: Sequence[Self]) -> Self:
        return cls(sum(share.part for share in shares), sum(share.whole for share in shares))


def reported(requests: Sequence[RequestRecord], offset: int | None) -> list[Share]:
    """The share of each answer, by an engine's counts; [] where it does not report them.

    Args:
        offset: of the draft token, from 0; None for tokens over iterations.
    """
    counts = [request.counts for request in requests]
    total = sum(counts, Drafts())
    if not total.answers or total.iterations is None:
        return []
    shares = []
    for drafts in counts:
        if offset is None:
            shares.append(Share(drafts.decoded or 0, drafts.iterations or 0))
            continue
        if drafts.accepted_at is None or drafts.drafting is None:
            return []
        accepted = [*drafts.accepted_at, *[0] * (offset + 1)]
        # Where iterations draft different numbers, those that accepted the token before it.
        tested = [*(drafts.tested or [drafts.drafting, *accepted]), *[0] * (offset + 1)]
        shares.append(Share(accepted[offset], tested[offset]))
    return shares


def expected(cut: Cut, num_draft_tokens: int, offset: int | None) -> Share:
    """The share of a text by the weights; the arguments are those of `reported`."""
    index = num_draft_tokens - 1
    if offset is None:
        return Share(cut.num_tokens, float(cut.iterations[index]))
    return Share(float(cut.accepted_at[index, offset]), float(cut.tested_at[index, offset]))


def limits(
    texts: Sequence[ReadText],
    num_draft_tokens: int,
    offset: int | None,
    num_tested: float = math.inf,
) -> Interval:
    """What the weights accept of these texts, in limits that an engine with these weights exceeds twice in a million.

    Args:
        num_tested: how often the engine tested the draft token there.
    """
    share = Share.total([expected(text.cut, num_draft_tokens, offset) for text in texts])
    if not share.whole:
        return Interval()
    rate = share.part / share.whole
    rounding = 0.0
    for text in texts:
        if text.rounded is not None:
            exact = expected(text.cut, num_draft_tokens, offset)
            rounded = expected(text.rounded, num_draft_tokens, offset)
            moved = rounded.part - exact.part - rate * (rounded.whole - exact.whole)
            rounding += _ROUNDING_ALLOWANCE * abs(moved) / share.whole
    if offset is None:
        variance = sum(float(text.cut.variance[num_draft_tokens - 1]) for text in texts)
        variance = max(variance, _LEAST_VARIANCE * len(texts))
        spread = MOST_DEVIATIONS * math.sqrt(variance)
        low = share.part / (share.whole + spread) - rounding
        high = share.part / max(share.whole - spread, 1.0) + rounding
    else:
        # Not 0 or 1, whose deviation is none.
        likely_rate = (share.part + 1) / (share.whole + 2)
        number = max(min(num_tested, share.whole), 1.0)
        spread = MOST_DEVIATIONS * math.sqrt(likely_rate * (1 - likely_rate) / number)
        low = max(0.0, rate - spread - rounding)
        high = min(1.0, rate + spread + rounding)
    return Interval(rate, low, high)


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
    found = texts_statement(AcceptanceRow(**likelihood_columns(texts)))
    return found is not None and not found.is_conclusion


def repeated_share(texts: Sequence[Sequence[int]]) -> float:
    """The share of the texts' tokens that end several which the text had before."""
    num_repeated = 0
    for text in texts:
        starts = range(len(text) - _REPEATED_TOKENS + 1)
        runs = [tuple(text[start : start + _REPEATED_TOKENS]) for start in starts]
        num_repeated += len(runs) - len({*runs})
    return num_repeated / sum(map(len, texts))


def served_columns(
    texts: Sequence[ReadText], requests: Sequence[RequestRecord], num_draft_tokens: int
) -> dict[str, Any]:
    """What an engine accepted, and what the weights of its models accept of the same answers.

    Args:
        texts: its answers, read by the weights.
        requests: the same answers.
        num_draft_tokens: the K that it drafts with.
    """
    counted = None
    if shares := reported(requests, None):
        num_tokens, num_iterations = Share.total(shares)
        counted = num_tokens / num_iterations if num_iterations else None
    together = tokens_in_burst(requests)
    # None where tokens come one by one, or all at once.
    arrived = together if together > 1 else None
    weights = limits(texts, num_draft_tokens, None)
    impossible = next((request.impossible for request in requests if request.impossible), None)
    why = None
    if not are_own(texts):
        why = "the texts are not the model's"
    elif counted is None and (arrived is None or weights.excludes(arrived)):
        why = "the engine does not report what it accepted"
        if impossible is not None:
            why = f"what the engine reports cannot be: {impossible}"
    elif counted is not None and counted < weights.low:
        is_short = _drafts_fewer(requests, num_iterations, num_draft_tokens)
        why = f"the engine drafts fewer than K={num_draft_tokens}" if is_short else None
    return {
        "served_tokens_per_iteration": counted,
        "arrived_tokens_per_iteration": arrived,
        "weights_tokens_per_iteration": weights,
        "engine_unknown": why,
    }


def _drafts_fewer(
    requests: Sequence[RequestRecord], num_iterations: float, num_draft_tokens: int
) -> bool:
    """Whether an engine drafts fewer than K tokens in some iterations that are not the last ones of an answer."""
    num_drafted = sum(request.draft_tokens[0] for request in requests)
    # At its end an answer lacks at most K, K - 1, ... and 1 of them.
    most_lost = len(requests) * num_draft_tokens * (num_draft_tokens + 1) / 2
    return 0 < num_drafted < num_iterations * num_draft_tokens - most_lost
