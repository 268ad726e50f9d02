"""Plans the draws of `recovery`: after which contexts, with which numbers of draft tokens, how
many.

Contexts are places in the prompts where a recovered token has most to decide. Most tokens of a text
are nearly certain, and there a wrong verification draws what a correct one draws. So prompts are
cut where the two differ, and draws are spent on a few of these places, deep enough to reach the
bonus token. The choice depends on the two models' probabilities and on no draw, so it does not
change the test's false-alarm rate.

For example, num_draws=60000 with K=4 means 5 contexts and 2 tests, of the draws with one draft
token and of those with four. That leaves 6,000 draws after each context for each test.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from harness.commands.recovery.lossless import MIN_EXPECTED, REQUIRED_POWER, SampledTest, together
from harness.commands.recovery.prefix_distribution import PrefixDistribution, exact_distribution
from harness.commands.recovery.record import RecoverySettings
from harness.config.settings import DecodingSettings, NumDraftTokens
from harness.decoding.warp import Warp
from harness.engines.checks.reference import REFERENCE_BATCH
from harness.engines.protocol import Reference, in_batches
from harness.engines.registry import engine_of
from harness.measuring.progress import say
from harness.models.ranks import of_rank_0

# More contexts would leave each with too few draws to show differences in later tokens.
NUM_CONTEXTS = 5
# Only so many tokens before the cut are read: any text is a prompt, and every draw has its own
# cache, which would take most of the time.
CONTEXT_TOKENS = 16
# Only the last places of a long prompt are considered, this many.
_NUM_PLACES = 64
# Multiples of the number of draws that are tried. Each costs another computation of the exact
# distributions, because with more draws rarer continuations count.
_FACTORS = (1, 2, 4, 8, 16, 32, 64)
# Draws of `num_draws=auto` over all contexts and tests, where so few are enough.
_FEWEST_DRAWS = 60_000


class Context(NamedTuple):
    """Tokens that draws continue: the last ones of a prompt's first `end` tokens."""

    prompt_index: int
    end: int
    token_ids: tuple[int, ...]


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

    def streams(self, context_number: int, test_number: int) -> range:
        """The streams of random numbers of the draws after one context for one test.

        With 2 contexts, 2 tests and 3 draws, test 0 has 0-2 and 6-8, and test 1 has 3-5 and 9-11.
        """
        part = context_number * len(self.tests) + test_number
        return range(part * self.num_draws, (part + 1) * self.num_draws)

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
    contexts = last_contexts(token_ids)
    if reference is not None:
        contexts = choose_contexts(reference, token_ids, decoding)
    own_number = settings.decoding.num_draft_tokens
    numbers: list[NumDraftTokens] = [own_number]
    # A server's own K cannot be changed. Without a draft it says only how many tokens are counted.
    if settings.draft is not None and engine_of(settings).computes_here and own_number != 1:
        numbers = [1, own_number]
    # One test after each context, and one of all contexts together.
    level_share = settings.false_alarm_rate / ((len(contexts) + 1) * len(numbers))
    tests = []
    for number in numbers:
        test = SampledTest(num_counted_tokens(number), level_share, settings.shift)
        tests.append(PlannedTest(number, test))
    num_parts = len(contexts) * len(tests)
    if settings.num_draws != "auto":
        return DrawPlan(decoding, contexts, tests, settings.num_draws // num_parts)
    fewest = _FEWEST_DRAWS // num_parts
    num_draws = fewest
    if reference is not None:
        say("working out how many draws are enough")
        for planned in tests:
            # Where no number is enough, the fewest are drawn: the verdict stays open.
            enough = draws_needed(reference, contexts, decoding, planned.test, fewest)
            num_draws = max(num_draws, enough or fewest)
    return DrawPlan(decoding, contexts, tests, num_draws)


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
    """How many draws after each context are enough for a verdict, `num_draws` or more.

    With num_draws=1000 it tries 1000, 2000, 4000, ..., 64000. If 4000 are enough and 2000 are not,
    it returns the smallest of 2100, 2200, ..., 4000 that is. None if 64000 are not enough.
    """
    for factor in _FACTORS:
        most = factor * num_draws
        exact = exact_after(reference, contexts, decoding, test.num_tokens, most)
        if not _has_power(test, exact, most):
            continue
        if factor == 1:
            return most
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


def _has_power(test: SampledTest, exact: Sequence[PrefixDistribution], num_draws: int) -> bool:
    """Whether so many draws after each context are enough for a verdict.

    Args:
        exact: the distribution after each context.
    """
    expected = together([test.expected(after_one, num_draws) for after_one in exact])
    return expected.power >= REQUIRED_POWER


@torch.inference_mode()
def choose_contexts(
    reference: Reference, prompts: Sequence[Sequence[int]], decoding: DecodingSettings
) -> list[Context]:
    """The contexts with the largest `recovered_entropy`, the largest first, each from another
    prompt.
    """
    contexts_by_prompt = []
    for index, prompt in enumerate(prompts):
        first_end = max(1, len(prompt) - _NUM_PLACES + 1)
        contexts_by_prompt.append(
            [
                Context(index, end, tuple(prompt[max(0, end - CONTEXT_TOKENS) : end]))
                for end in range(first_end, len(prompt) + 1)
            ]
        )
    # Prompts that begin alike have contexts in common.
    different = dict.fromkeys(
        context.token_ids for contexts in contexts_by_prompt for context in contexts
    )
    entropy: dict[tuple[int, ...], float] = {}
    for batch in in_batches(list(different), REFERENCE_BATCH):
        # Processes that share a split model may round differently, and must not choose differently.
        entropies = of_rank_0(recovered_entropy(reference, batch, decoding)).tolist()
        entropy.update(zip(batch, entropies, strict=True))

    def entropy_of(context: Context) -> float:
        return entropy[context.token_ids]

    chosen: dict[tuple[int, ...], Context] = {}
    for contexts in contexts_by_prompt:
        left = [context for context in contexts if context.token_ids not in chosen]
        if left:
            best = max(left, key=entropy_of)
            chosen[best.token_ids] = best
    return sorted(chosen.values(), key=entropy_of, reverse=True)[:NUM_CONTEXTS]


def last_contexts(prompts: Sequence[Sequence[int]]) -> list[Context]:
    """The ends of the first prompts, each end once, where no probabilities say which places are
    better.
    """
    found: dict[tuple[int, ...], Context] = {}
    for index, prompt in enumerate(prompts):
        context = Context(index, len(prompt), tuple(prompt[-CONTEXT_TOKENS:]))
        found.setdefault(context.token_ids, context)
    return list(found.values())[:NUM_CONTEXTS]


def recovered_entropy(
    reference: Reference, contexts: Sequence[Sequence[int]], decoding: DecodingSettings
) -> Tensor:
    """How much the recovered token decides after each context: [B], in nats.

    For example: after `Once upon a` the likeliest first token is `time`, with 0.9; the draft's
    proposal behind it is rejected with 0.4; the residual distribution, from which the recovered
    token is then drawn, has an entropy of 1.2 nats. That makes 0.9 * 0.4 * 1.2. A deterministic
    draft counts as always rejected, and its residual is the target's whole distribution.
    """
    warp = Warp(decoding.temperature, decoding.top_k, decoding.top_p)
    first = warp(reference.logits(contexts)).max(-1)
    first_tokens = first.indices.tolist()
    residual = warp(reference.logits(contexts, [[token] for token in first_tokens]))
    drafted = reference.draft_probabilities(contexts, first_tokens, decoding)
    if drafted is not None:
        residual = (residual - drafted).clamp(min=0)
    rejection = residual.sum(-1, keepdim=True)
    # Where nothing can be rejected there is no recovered token.
    entropy = torch.special.entr(
        residual / rejection.clamp(min=torch.finfo(residual.dtype).tiny)
    ).sum(-1)
    return first.values * rejection.squeeze(-1) * entropy
