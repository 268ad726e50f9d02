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
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from harness.commands.latency.figures.measured import Group, MeasuredArm, MeasuredRun
from harness.config.errors import RunError
from harness.results.acceptance import Acceptance
from harness.results.row import pooled
from harness.results.schema import MaybeBool, MaybeFloat

if TYPE_CHECKING:
    from harness.engines.protocol import Engine

# Acceptance of tested tokens above this is not suspicious.
_LOW = 0.2
# The estimate is rough: acceptance may be lower by this factor.
_MARGIN = 4.0
# At that limit so few tokens are accepted with at most this chance.
_FALSE_ALARM_RATE = 1e-6
# Questions that are asked again, greedily: enough for the estimate.
_MOST_QUESTIONS = 5


@dataclass(frozen=True, kw_only=True)
class Suspicion(Group):
    """Whether sampled acceptance is implausibly low given greedy acceptance."""

    greedy_acceptance_rate: MaybeFloat = pooled(
        "mean", "accepted / tested at temperature 0, asked of other engines where acceptance is low"
    )
    likeliest_share: MaybeFloat = pooled(
        "mean",
        "share of the target's draws that are its likeliest token, asked where acceptance is low",
    )
    suspicious: MaybeBool = pooled(
        "any",
        "True if sampled acceptance is implausibly low given greedy acceptance: suggests a verification bug",
    )

    @classmethod
    def measured(cls, run: MeasuredRun, arm: MeasuredArm) -> Group:
        return cls() if run.suspicion is None or run.pair(arm) is None else run.suspicion


def suspicion(engine: Engine, run: MeasuredRun) -> Suspicion | None:
    """Ask another engine whether its sampling looks right; None where acceptance is not low, or
    nothing can be compared.
    """
    from harness.engines.registry import engine_of
    from harness.engines.timing import generate
    from harness.results.statistics.distributions import binomial_cdf

    is_sampled = run.settings.decoding.temperature > 0
    if engine_of(run.settings).own_loop or not is_sampled or len(engine.arms) == 1:
        return None
    acceptance = run.arms["speculative"].acceptance
    num_tested = acceptance.num_tested
    if not num_tested or acceptance.num_accepted > _LOW * num_tested:
        return None
    beginnings: list[_Beginning] = []
    greedy = Acceptance()
    # Both arms are measured by now: a failure here must not lose that.
    with suppress(RunError):
        for drawn in run.arms["regular"].generations[:_MOST_QUESTIONS]:
            question = drawn.question
            assert question is not None
            decoding = dataclasses.replace(question.decoding, temperature=0.0)
            greedily = dataclasses.replace(question, decoding=decoding)
            regular, speculative = (generate(engine, arm, greedily) for arm in engine.arms)
            beginnings += map(_compared_beginning, regular.tokens, drawn.tokens)
            greedy += speculative.acceptance
    num_draws = sum(beginning.num_draws for beginning in beginnings)
    if not num_draws or not greedy.num_tested:
        return None
    greedy_rate = greedy.num_accepted / greedy.num_tested
    likeliest_share = sum(beginning.num_likeliest for beginning in beginnings) / num_draws
    limit = greedy_rate * likeliest_share / _MARGIN
    chance = binomial_cdf(acceptance.num_accepted, num_tested, limit)
    return Suspicion(
        greedy_acceptance_rate=greedy_rate,
        likeliest_share=likeliest_share,
        suspicious=chance < _FALSE_ALARM_RATE,
    )


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
