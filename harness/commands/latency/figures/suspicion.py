"""Is acceptance so low that the engine itself looks wrong? Asked of engines whose verification is
not ours.

A draft that agrees with the target greedily also agrees with its draws, as far as these are the
likeliest token. So of the tested draft tokens about (greedy acceptance) × (share of the target's
draws that are the likeliest token) are accepted at any temperature, whether the draft draws or not.
An engine that stays far below this rejects what it should accept. For example, greedy acceptance is
0.8, and 0.7 of the target's draws are the likeliest token: about 0.56 are expected. An acceptance
of 0.1 over many tokens is suspicious.

`recovery` tests that exactly; this takes a few greedy texts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from harness.config.errors import RunError
from harness.engines.protocol import Engine, Question
from harness.engines.timing import Generation, generate
from harness.results.acceptance import Acceptance
from harness.results.statistics.distributions import binomial_cdf

# Acceptance of tested tokens above this is not suspicious.
_LOW = 0.2
# The estimate is rough: acceptance may be lower by this factor.
_MARGIN = 4.0
# At that limit so few tokens are accepted with at most this chance.
_FALSE_ALARM_RATE = 1e-6
# Questions that are asked again, greedily: enough for the estimate.
_MOST_QUESTIONS = 5


def suspicion(
    engine: Engine,
    questions: Sequence[Question],
    sampled: Sequence[Generation],
    acceptance: Acceptance,
) -> dict[str, Any]:
    """The columns about suspicious acceptance; none where it is not low, or nothing can be
    compared.

    Args:
        sampled: the regular arm's answers to the questions.
        acceptance: of the speculative arm.
    """
    num_tested = acceptance.num_tested
    if not num_tested or acceptance.num_accepted > _LOW * num_tested:
        return {}
    beginnings: list[_Beginning] = []
    greedy = Acceptance()
    # Both arms are measured by now: a failure here must not lose that.
    with suppress(RunError):
        for question, drawn in list(zip(questions, sampled, strict=True))[:_MOST_QUESTIONS]:
            decoding = dataclasses.replace(question.decoding, temperature=0.0)
            greedily = dataclasses.replace(question, decoding=decoding)
            regular, speculative = (generate(engine, arm, greedily) for arm in engine.arms)
            beginnings += map(_compared_beginning, regular.tokens, drawn.tokens)
            greedy += speculative.acceptance
    num_draws = sum(beginning.num_draws for beginning in beginnings)
    if not num_draws or not greedy.num_tested:
        return {}
    greedy_rate = greedy.num_accepted / greedy.num_tested
    likeliest_share = sum(beginning.num_likeliest for beginning in beginnings) / num_draws
    limit = greedy_rate * likeliest_share / _MARGIN
    chance = binomial_cdf(acceptance.num_accepted, num_tested, limit)
    return {
        "greedy_acceptance_rate": greedy_rate,
        "likeliest_share": likeliest_share,
        "suspicious": chance < _FALSE_ALARM_RATE,
    }


class _Beginning(NamedTuple):
    """The beginning of a drawn text, up to and with the first token that is not the likeliest one.

    After that token the greedy text no longer shows which token is the likeliest.
    """

    num_draws: int
    num_likeliest: int


def _compared_beginning(greedy: Iterable[int], drawn: Iterable[int]) -> _Beginning:
    """Compare greedy 5 6 7 with drawn 5 6 9 8: three draws, two of them the likeliest token."""
    num_likeliest = 0
    for likeliest, token in zip(greedy, drawn, strict=False):
        if likeliest != token:
            return _Beginning(num_draws=num_likeliest + 1, num_likeliest=num_likeliest)
        num_likeliest += 1
    return _Beginning(num_draws=num_likeliest, num_likeliest=num_likeliest)
