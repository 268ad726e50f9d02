"""Computes columns about texts: how likely they are under the target, and how much the engine that wrote them accepted,
compared with what its weights predict.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

from harness.config.amounts import percent
from harness.engines.door.reading import ReadText
from harness.engines.requests import RequestRecord
from harness.measuring.acceptance import tokens_in_burst
from harness.results.drafts import Drafts
from harness.results.judging.acceptance import MOST_DEVIATIONS, texts_statement
from harness.results.rows.acceptance import AcceptanceRow
from harness.results.statistics.interval import Interval
from harness.results.statistics.iterations import Cut

# The acceptance that the weights predict is computed in two ways, which differ by rounding. The engine's acceptance may
# differ from the prediction by this many times the difference between the two.
_ROUNDING_ALLOWANCE = 2.0
# The variance of the number of iterations of an answer is assumed to be at least this: engines differ in how they draft
# at the end of an answer, and a tie between two tokens may be broken either way.
_LEAST_VARIANCE = 0.25
# A sequence of this many tokens counts as repeated if it occurred earlier in the text.
_REPEATED_TOKENS = 4


class Share(NamedTuple):
    """A ratio `part / whole`: tokens / the iterations that decided them, or accepted / tested draft tokens at one
    position.
    """

    part: float
    whole: float

    @classmethod
    def total(cls, shares: Sequence[Self]) -> Self:
        return cls(sum(share.part for share in shares), sum(share.whole for share in shares))


def reported(
    requests: Sequence[RequestRecord], num_draft_tokens: int, offset: int | None
) -> list[Share]:
    """The share of each answer according to an engine's counts; [] if these counts do not determine it.

    With 10 iterations that drafted, of which 7 accepted the first draft token and 4 also the second, the share at
    offset 0 is 7 / 10, and that at offset 1 is 4 / 7.

    Args:
        num_draft_tokens: the engine's K.
        offset: position of the draft token, from 0; None for tokens over iterations.
    """
    counts = [request.as_drafts for request in requests]
    total = Drafts.total(counts)
    if not total.answers or total.iterations is None:
        return []
    shares = []
    for drafts in counts:
        if offset is None:
            shares.append(Share(drafts.decoded or 0, drafts.iterations or 0))
            continue
        if drafts.accepted_at is None or drafts.drafting is None:
            return []
        # If the counts do not show which tokens were tested (`Drafts.tested`), a token counts as tested if the token
        # before it was accepted. The first one was tested in each iteration that drafted. Both are wrong if iterations
        # draft different numbers of tokens.
        is_guessed = drafts.tested is None and offset > 0
        if is_guessed and _drafts_fewer(counts, total.drafting or 0, num_draft_tokens):
            return []
        accepted = [*drafts.accepted_at, *[0] * (offset + 1)]
        tested = [*(drafts.tested or [drafts.drafting, *accepted]), *[0] * (offset + 1)]
        shares.append(Share(accepted[offset], tested[offset]))
    return shares


def expected(cut: Cut, num_draft_tokens: int, offset: int | None) -> Share:
    """The share that the weights predict for a text. `num_draft_tokens` and `offset` are as for `limits`."""
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
    """Return the acceptance that the weights predict for these texts, with limits. An engine with these weights is
    outside the limits with a probability of two in a million.

    Args:
        num_draft_tokens: K.
        offset: position of the draft token, from 0; None for tokens per iteration.
        num_tested: how often the engine tested the draft token at this position; unused without `offset`.

    Returns:
        Tokens per iteration, or the acceptance rate at the position; unknown if nothing is tested there.
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
            # To first order, rounding moves the rate by this much, divided by the whole.
            moved = rounded.part - exact.part - rate * (rounded.whole - exact.whole)
            rounding += _ROUNDING_ALLOWANCE * abs(moved) / share.whole
    if offset is None:
        variance = sum(float(text.cut.variance[num_draft_tokens - 1]) for text in texts)
        variance = max(variance, _LEAST_VARIANCE * len(texts))
        spread = MOST_DEVIATIONS * math.sqrt(variance)
        low = share.part / (share.whole + spread) - rounding
        # At least one iteration is needed.
        high = share.part / max(share.whole - spread, 1.0) + rounding
    else:
        # Move the rate away from 0 and 1, where its standard deviation would be 0 (Laplace's rule of succession).
        likely_rate = (share.part + 1) / (share.whole + 2)
        number = max(min(num_tested, share.whole), 1.0)
        spread = MOST_DEVIATIONS * math.sqrt(likely_rate * (1 - likely_rate) / number)
        low = max(0.0, rate - spread - rounding)
        high = min(1.0, rate + spread + rounding)
    return Interval(rate, low, high)


def likelihood_columns(texts: Sequence[ReadText]) -> dict[str, Any]:
    """The columns about how likely texts are under the target, compared with the target's own texts.

    Args:
        texts: at least one.
    """
    num_tokens = sum(text.num_tokens for text in texts)
    num_impossible = sum(text.num_impossible for text in texts)
    num_possible = num_tokens - num_impossible
    log_probability = sum(text.log_probability for text in texts)
    own_log_probability = sum(text.expected for text in texts)
    deviation = math.sqrt(sum(text.variance for text in texts))
    return {
        "log_probability": log_probability / num_possible if num_possible else None,
        "own_log_probability": own_log_probability / num_possible if num_possible else None,
        "likelihood_z": (log_probability - own_log_probability) / deviation if deviation else None,
        "impossible_share": num_impossible / num_tokens,
    }


def are_own(texts: Sequence[ReadText]) -> bool:
    """Whether texts are as likely under the target as texts that it writes itself. `texts` must not be empty."""
    found = texts_statement(AcceptanceRow(**likelihood_columns(texts)))
    return found is not None and not found.is_conclusion


def repeated_share(texts: Sequence[Sequence[int]]) -> float:
    """The share of the texts' tokens that end a sequence of four tokens which occurred earlier in the same text.

    Args:
        texts: token ids of each text; at least one token in all.
    """
    num_repeated = 0
    for text in texts:
        starts = range(len(text) - _REPEATED_TOKENS + 1)
        runs = [tuple(text[start : start + _REPEATED_TOKENS]) for start in starts]
        num_repeated += len(runs) - len({*runs})
    return num_repeated / sum(map(len, texts))


def why_impossible(requests: Sequence[RequestRecord]) -> str | None:
    """A sentence about the first answer whose counts cannot be true; None if there is none."""
    found = next((request.impossible for request in requests if request.impossible), None)
    return found and f"what the engine reports cannot be true: {found}"


def served_columns(
    texts: Sequence[ReadText],
    requests: Sequence[RequestRecord],
    num_draft_tokens: int,
    *,
    is_typed: bool = False,
) -> dict[str, Any]:
    """Columns about what an engine accepted, and what the weights of its models predict for the same answers.

    Args:
        texts: the engine's answers, as read with the weights; at least one.
        requests: the engine's records of the same answers, in the same order.
        num_draft_tokens: the engine's K.
        is_typed: whether the user typed this K. If not, it is the longest draft that the engine's counts show.
    """
    counted = None
    if shares := reported(requests, num_draft_tokens, None):
        num_tokens, num_iterations = Share.total(shares)
        counted = num_tokens / num_iterations if num_iterations else None
    drafts = [request.as_drafts for request in requests]
    together = tokens_in_burst(requests)
    # None if tokens arrive one by one, or all tokens of an answer together.
    arrived = together if together > 1 else None
    weights = limits(texts, num_draft_tokens, None)
    if counted is not None and not weights.excludes(counted):
        arrived = None
    # The engine is judged by `counted` or, without it, by `arrived`; `why` stays None if one of them can be judged.
    why = None
    if not are_own(texts):
        why = "the texts are not the model's"
    # Arrivals are believed only if they agree with the weights: tokens that arrive together need not be those of one
    # iteration.
    elif counted is None and (arrived is None or weights.excludes(arrived)):
        why = why_impossible(requests)
        # An answer that ends within a proposal has accepted tokens after its end.
        rate = Drafts.total(drafts).columns()["acceptance_rate"]
        if why is None and rate is not None:
            why = (
                f"{percent(rate)} of the draft tokens were accepted, but an answer's counts do not show the tokens per"
                " iteration (with batch_size=1, and --metrics for llama.cpp, the server's counters may)"
            )
        why = why or "the engine drafts nothing, or does not report what it accepted"
    elif counted is not None and counted < weights.low:
        is_short = _drafts_fewer(drafts, num_iterations, num_draft_tokens)
        why = f"the engine may draft fewer than K={num_draft_tokens}" if is_short else None
    elif counted is not None and counted > weights.high and not is_typed:
        # The mean number of draft tokens hides longer drafts, unless all are equally long.
        hidden = [
            each.accepted_at is None and (each.proposed or 0) % (each.iterations or 1)
            for each in drafts
        ]
        if any(hidden):
            why = "the engine may draft more than its mean shows: type its K="
    return {
        "served_tokens_per_iteration": counted,
        "arrived_tokens_per_iteration": arrived,
        "weights_tokens_per_iteration": weights,
        "engine_unknown": why,
    }


def _drafts_fewer(answers: Sequence[Drafts], num_iterations: float, k: int) -> bool:
    """Whether an engine drafts fewer than K tokens in some iterations before the last ones of an answer, or may never
    have drafted K tokens at all.
    """
    num_drafted = sum(drafts.proposed or 0 for drafts in answers)
    # Each of the last K iterations of an answer may draft fewer tokens than K: the last one up to K fewer, the one
    # before it up to K - 1 fewer, and so on.
    most_lost = len(answers) * k * (k + 1) / 2
    fewest = num_iterations * k - most_lost
    # In short answers, most iterations are among the last ones. Then K is only shown by more drafts than K - 1 allows.
    most_with_less = num_iterations * (k - 1)
    return num_drafted > 0 and (num_drafted < fewest or num_drafted <= most_with_less)
