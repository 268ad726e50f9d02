"""Plans the draws of `recovery`: after which contexts, with which numbers of draft tokens, how
many.

For example, num_draws=60000 with K=4 means 5 contexts and 2 tests, of the draws with one draft
token and of those with four. That leaves 6,000 draws after each context for each test.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from harness.config.settings import DecodingSettings, NumDraftTokens
from harness.engines.protocol import Reference
from harness.experiments.contexts import Context, choose_contexts, last_contexts
from harness.experiments.lossless import MIN_EXPECTED, REQUIRED_POWER, SampledTest, together
from harness.experiments.prefix_distribution import PrefixDistribution, exact_distribution
from harness.experiments.progress import say
from harness.menu.commands.recovery import RecoverySettings
from harness.menu.records import engine_of

# Multiples of the number of draws that are tried. Each costs another computation of the exact
# distributions, because with more draws rarer continuations count.
_FACTORS = (2, 4, 8, 16, 32, 64)
# Draws of `num_draws=auto` over all contexts and tests, where so few are enough.
_FEWEST_DRAWS = 60_000


class PlannedTest(NamedTuple):
    """The test of the draws with one number of draft tokens: 1, or the run's own."""

    num_draft_tokens: NumDraftTokens
    test: SampledTest


class DrawPlan(NamedTuple):
    """The draws that `recovery` takes.

    Attributes:
        num_draws: after each context, for each test.
    """

    decoding: DecodingSettings
    contexts: Sequence[Context]
    tests: Sequence[PlannedTest]
    num_draws: int

    @property
    def num_parts(self) -> int:
        """Combinations of a context and a test; each has `num_draws` draws."""
        return len(self.contexts) * len(self.tests)

    def streams_of(self, test_number: int) -> list[range]:
        """The streams of random numbers of a test's draws: one range for each context.

        With 2 contexts, 2 tests and 3 draws, test 0 has 0-2 and 6-8, and test 1 has 3-5 and 9-11.
        """
        streams: list[range] = []
        for context_number in range(len(self.contexts)):
            part = context_number * len(self.tests) + test_number
            first = part * self.num_draws
            streams.append(range(first, first + self.num_draws))
        return streams

    def exact(self, reference: Reference | None) -> list[PrefixDistribution] | None:
        """The exact distribution after each context, over the tokens of the longest test; None where
        the exact probabilities are unknown.
        """
        if reference is None:
            return None
        num_tokens = max(planned.test.num_tokens for planned in self.tests)
        return exact_after(reference, self.contexts, self.decoding, num_tokens, self.num_draws)


def plan_draws(
    settings: RecoverySettings, reference: Reference | None, token_ids: Sequence[Sequence[int]]
) -> DrawPlan:
    """Choose contexts in the prompts, the tests, and the number of draws.

    With one draft token, acceptance, rejection, bonus and what follows a roll-back all fall on the
    second and third token already. With the run's own number the whole first proposal and its bonus
    token are generated.

    Args:
        reference: None where the exact probabilities are unknown.
        token_ids: of each prompt.
    """
    # No text ends before its last token.
    decoding = dataclasses.replace(settings.decoding, ignore_eos=True)
    numbers = _numbers_of_draft_tokens(settings)
    contexts = last_contexts(token_ids)
    if reference is not None:
        contexts = choose_contexts(reference, token_ids, decoding)
    # One test after each context, and one of all contexts together.
    num_tests = (len(contexts) + 1) * len(numbers)
    level_share = settings.false_alarm_rate / num_tests
    tests = []
    for number in numbers:
        test = SampledTest(num_counted_tokens(number), level_share, settings.shift)
        tests.append(PlannedTest(number, test))
    num_parts = len(contexts) * len(tests)
    if settings.num_draws != "auto":
        return DrawPlan(decoding, contexts, tests, settings.num_draws // num_parts)
    plan = DrawPlan(decoding, contexts, tests, _FEWEST_DRAWS // num_parts)
    if reference is None:
        return plan
    say("working out how many draws are enough")
    # Where no number is enough, the fewest are drawn: the verdict stays open.
    enough = [_num_enough(reference, plan, planned.test) or plan.num_draws for planned in tests]
    return plan._replace(num_draws=max(enough))


def total_draws_needed(
    reference: Reference | None, plan: DrawPlan, test: SampledTest
) -> int | None:
    """The setting `num_draws` that would be enough for a test; None if that is not known."""
    if reference is None:
        return None
    say("working out how many draws would be enough")
    needed = draws_needed(reference, plan.contexts, plan.decoding, test, plan.num_draws)
    return None if needed is None else needed * plan.num_parts


def num_counted_tokens(num_draft_tokens: NumDraftTokens) -> int:
    """The first token, which is the target's own, then a whole proposal, then its bonus token.

    Of `auto` a proposal of four: longer ones would spread the draws over more continuations than
    they can test.
    """
    return (4 if num_draft_tokens == "auto" else num_draft_tokens) + 2


def draws_needed(
    reference: Reference,
    contexts: Sequence[Context],
    decoding: DecodingSettings,
    test: SampledTest,
    num_draws: int,
) -> int | None:
    """How many draws after each context are enough for a verdict, if `num_draws` are not.

    With num_draws=1000 it tries 2000, 4000, ..., 64000. If 4000 are enough and 2000 are not, it
    returns the smallest of 2100, 2200, ..., 4000 that is. None if 64000 are not enough.
    """
    for factor in _FACTORS:
        most = factor * num_draws
        exact = exact_after(reference, contexts, decoding, test.num_tokens, most)
        if _has_power(test, exact, most):
            # Twentieths of the last step.
            fewer = [round(most * (0.5 + step / 40)) for step in range(1, 20)]
            return next((number for number in fewer if _has_power(test, exact, number)), most)
    return None


def exact_after(
    reference: Reference,
    contexts: Sequence[Context],
    decoding: DecodingSettings,
    num_tokens: int,
    num_draws: int,
) -> list[PrefixDistribution]:
    """The exact distribution after each context, as finely as so many draws can test it."""
    rare = MIN_EXPECTED / num_draws
    return [
        exact_distribution(reference, context.token_ids, decoding, num_tokens, rare)
        for context in contexts
    ]


def _numbers_of_draft_tokens(settings: RecoverySettings) -> Sequence[NumDraftTokens]:
    """The K that are tested."""
    own_number = settings.decoding.num_draft_tokens
    # A server's own K cannot be changed. Without a draft it says only how many tokens are counted.
    if settings.draft is None or not engine_of(settings).computes_here or own_number == 1:
        return (own_number,)
    return (1, own_number)


def _num_enough(reference: Reference, plan: DrawPlan, test: SampledTest) -> int | None:
    """How many draws after each context are enough, at least the plan's; None if that is not known."""
    contexts = plan.contexts
    decoding = plan.decoding
    exact = exact_after(reference, contexts, decoding, test.num_tokens, plan.num_draws)
    if _has_power(test, exact, plan.num_draws):
        return plan.num_draws
    return draws_needed(reference, contexts, decoding, test, plan.num_draws)


def _has_power(test: SampledTest, exact: Sequence[PrefixDistribution], num_draws: int) -> bool:
    """Whether so many draws after each context are enough for a verdict.

    Args:
        exact: the distribution after each context.
    """
    expected = together([test.expected(after_one, num_draws) for after_one in exact])
    return expected.power >= REQUIRED_POWER
