"""Is an arm lossless? Two tests that look only at its tokens, so that any arm can be tested.

Greedy, its tokens must be the regular arm's (`judge_greedy`). Sampled, the first tokens of many
continuations of one prompt must follow the target's exact distribution: a `SampledTest` of them
yields a `SampledCheck`, and `together` adds up the checks of several prompts.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from harness.commands.recovery.prefix_distribution import PrefixDistribution, observed_distribution
from harness.config.errors import RunError
from harness.engines.checks.divergence import Divergence, first_divergence
from harness.engines.requests import RequestRecord
from harness.engines.timing import Generation
from harness.measuring.references import References
from harness.results.acceptance import Acceptance
from harness.results.statistics.arrays import Floats
from harness.results.statistics.chi_square import (
    chi_square_distance,
    chi_square_p_value,
    chi_square_tail_power,
    chi_square_test,
)

Finding = Literal["lossless", "lossy", "undecided"]

# Fewest draws that a cell of the χ² test is expected to get. Far out in the tail the χ²
# approximation rejects too often, and the more so the rarer the cells: with 100 the true
# false-alarm rate at a nominal 1e-11 is 3e-10 (exact binomial sums of two cells). So each test uses
# a hundredth of its share, and the stated rate is kept.
MIN_EXPECTED = 100
SHARE_OF_LEVEL = 0.01
# With less than this chance of seeing the stated shift, finding nothing proves nothing.
REQUIRED_POWER = 0.99
# The null may be twice as far from the exact distribution as two ways of computing it are apart:
# the loop's forward passes have shapes that differ from both. Distances are squared, so 4 = 2². In
# float32 this is nothing; in half precision it is most of the threshold.
ROUNDING_ALLOWANCE = 4.0


def judge_greedy(divergences: Sequence[Divergence | None]) -> tuple[Finding, Divergence | None]:
    """Whether greedy texts are the regular arm's, and the difference that decides it.

    `lossy` if a difference is known to be beyond rounding (an `excess` above 1): the largest one
    decides. Else `undecided` if the margin of one is unknown (there is no reference, or a text
    ended earlier). Else `lossless`.

    Args:
        divergences: one per prompt, None where the texts are the same.
    """
    found = [divergence for divergence in divergences if divergence is not None]
    known = [divergence for divergence in found if divergence.logit_margin is not None]
    unknown = [divergence for divergence in found if divergence.logit_margin is None]
    worst = max(known, key=operator.attrgetter("excess"), default=None)
    if worst is not None and worst.excess > 1:
        return "lossy", worst
    if unknown:
        return "undecided", unknown[0]
    return "lossless", worst


def is_cut_short(text: RequestRecord, num_tokens: int, end_tokens: frozenset[int]) -> bool:
    """Whether a text has fewer than `num_tokens` tokens although no end token ended it."""
    has_ended = bool(text.token_ids) and text.token_ids[-1] in end_tokens
    return text.num_tokens < num_tokens and not has_ended


@dataclass
class GreedyTexts:
    """The greedy texts of a run that were compared.

    Attributes:
        end_tokens: those at which the target ends a text.
        divergences: one per prompt, None where nothing differs.
        num_tokens: compared: those behind the first difference of a text are not.
        num_cut_short: prompts with a text that is cut short, so that its end was not compared.
    """

    end_tokens: frozenset[int]
    divergences: list[Divergence | None] = field(default_factory=list)
    num_tokens: int = 0
    num_cut_short: int = 0

    def add(self, divergence: Divergence | None, num_asked: int, *texts: RequestRecord) -> None:
        """Add the comparison of two texts, or of one with the model's own.

        Args:
            num_asked: tokens that each was to have.
        """
        shortest = min(text.num_tokens for text in texts)
        self.divergences.append(divergence)
        self.num_tokens += shortest if divergence is None else min(shortest, divergence.position)
        self.num_cut_short += any(is_cut_short(text, num_asked, self.end_tokens) for text in texts)

    def compare(
        self,
        references: References,
        prompt: Sequence[int],
        num_asked: int,
        answer: RequestRecord,
        expected: RequestRecord | None,
    ) -> None:
        """Add the comparison of an answer with the regular arm's, or that of a request alone.

        An answer of text alone is compared with the text that the reference writes, if there is
        one: its tokens may have been decided as others.

        Args:
            num_asked: tokens that each was to have.
            expected: None if the reference alone is compared with.
        """
        divergence = None
        if expected is None or expected.token_ids != answer.token_ids:
            of_text = answer.from_text and references.for_texts() is not None
            if expected is None or of_text:
                divergence = references.text_divergence(prompt, answer.text, num_asked)
            else:
                # Of decided tokens the reference knows the margin.
                known = None if answer.from_text else references.for_tokens()
                divergence = first_divergence(known, prompt, expected.token_ids, answer.token_ids)
        if expected is None:
            # A text that the model would go on with parts from it at its end.
            self.add(divergence, 0, answer)
        else:
            self.add(divergence, num_asked, expected, answer)

    def columns(self) -> dict[str, Any]:
        """The columns of the check."""
        verdict, worst = judge_greedy(self.divergences)
        if verdict == "lossless" and self.num_cut_short:
            verdict = "undecided"
        return {
            "check": "greedy",
            "temperature": 0.0,
            "verdict": verdict,
            "num_prompts": len(self.divergences),
            "num_tokens": self.num_tokens,
            "num_cut_short": self.num_cut_short,
            "identical_prompts": self.divergences.count(None),
            "divergence_position": worst and worst.position,
            "logit_margin": worst and worst.logit_margin,
            "logit_tolerance": worst and worst.logit_tolerance,
        }


def require_token_ids(requests: Sequence[RequestRecord]) -> None:
    """Raise a RunError if token ids of an answer were made from its text: other tokens with the
    same text may have been drawn.
    """
    num_incomplete = sum(request.from_text for request in requests)
    if num_incomplete:
        raise RunError(
            f"{num_incomplete} of {len(requests)} answers came without the ids of all their tokens,"
            " so that these cannot be compared\n"
            "(llama.cpp tells none of a token that ends within a character)"
        )


@dataclass(frozen=True, kw_only=True)
class SampledCheck:
    """Whether drawn tokens follow the exact distribution: the result of one χ² test, or of several
    together.

    Attributes:
        significance_level: a p-value below it calls the arm lossy.
        rounding: by how much rounding of the logits may raise the statistic on average.
        visible: by how much the stated shift would raise it on average: one number for each token
            that may be shifted. Of continuations these are the second token, where a proposal is
            tested, and the third, which follows an acceptance (with one draft token it is the bonus
            token) or a roll-back; the first token is the target's own.
        acceptance: of the draft tokens behind the draws: without rejections, much of the algorithm
            never ran.
    """

    significance_level: float
    num_draws: int
    statistic: float
    degrees_of_freedom: int
    rounding: float
    visible: Floats
    acceptance: Acceptance = field(default_factory=Acceptance)

    @property
    def p_value(self) -> float:
        return chi_square_p_value(self.statistic, self.degrees_of_freedom, self.rounding)

    @property
    def power(self) -> float:
        """Chance that the test sees the shift of the token where it sees it least."""
        return chi_square_tail_power(
            self.degrees_of_freedom,
            noncentrality=float(self.visible.min()),
            alpha=self.significance_level,
            tolerated=self.rounding,
        )

    @property
    def verdict(self) -> Finding:
        if self.p_value < self.significance_level:
            return "lossy"
        return "lossless" if self.power >= REQUIRED_POWER else "undecided"

    def columns(self) -> dict[str, Any]:
        """The columns of the check, and its acceptance as `Session.row` takes it."""
        return {
            "check": "sampled",
            "num_draws": self.num_draws,
            "statistic": self.statistic,
            "degrees_of_freedom": self.degrees_of_freedom,
            "p_value": self.p_value if self.degrees_of_freedom else None,
            "significance_level": self.significance_level,
            "power": self.power,
            "rounding": self.rounding,
            "verdict": self.verdict,
            "acceptance": self.acceptance,
        }


def together(checks: Sequence[SampledCheck]) -> SampledCheck:
    """Independent checks as one: a small loss everywhere shows in the sum before it shows in any
    part.
    """
    return dataclasses.replace(
        checks[0],
        num_draws=sum(check.num_draws for check in checks),
        statistic=sum(check.statistic for check in checks),
        degrees_of_freedom=sum(check.degrees_of_freedom for check in checks),
        rounding=sum(check.rounding for check in checks),
        visible=np.sum([check.visible for check in checks], axis=0),
        acceptance=sum((check.acceptance for check in checks), Acceptance()),
    )


@dataclass(frozen=True)
class SampledTest:
    """The test of the draws after one prompt.

    Attributes:
        num_tokens: counted of each continuation.
        level_share: this test's share of the run's false-alarm rate; its significance level is
            `SHARE_OF_LEVEL` of that.
        shift: total variation of a token's distribution that must be seen.
    """

    num_tokens: int
    level_share: float
    shift: float

    def check(self, draws: Iterable[Generation], exact: PrefixDistribution) -> SampledCheck:
        """Compare draws, continuations of one prompt by `num_tokens` tokens, with what is exact."""
        exact = exact.first(self.num_tokens)
        counts = exact.count([])
        acceptance = Acceptance()
        for generation in draws:
            counts += exact.count(generation.tokens)
            acceptance += generation.acceptance
        return self._check([counts], exact, acceptance)

    def expected(self, exact: PrefixDistribution, num_draws: int) -> SampledCheck:
        """Return the check of draws that have exactly the expected counts: only its power means
        anything.
        """
        exact = exact.first(self.num_tokens)
        return self._check([exact.cells * num_draws], exact, Acceptance())

    def compare(self, regular: Sequence[Generation], other: Sequence[Generation]) -> SampledCheck:
        """Compare as many continuations of one prompt by two arms: both have one distribution.

        It takes twice the draws of `check` to see the same shift, and half of them are the regular
        arm's.
        """
        samples = [
            [tokens for generation in arm for tokens in generation.tokens]
            for arm in (regular, other)
        ]
        pooled = observed_distribution(
            [*samples[0], *samples[1]], self.num_tokens, 2 * MIN_EXPECTED
        )
        acceptance = sum((generation.acceptance for generation in other), Acceptance())
        return self._check([pooled.count(sample) for sample in samples], pooled, acceptance)

    def _check(
        self, counts: Sequence[ArrayLike], exact: PrefixDistribution, acceptance: Acceptance
    ) -> SampledCheck:
        """Test one sample against the exact distribution, or two against their pooled one.

        Two samples of n draws each deviate by half of their difference d from the pooled
        distribution p: n Σ (d/2)²/p each, n/2 Σ d²/p together. So distances count for n / 2. The
        pooled distribution was estimated, so both statistics together have the degrees of freedom
        of one.

        Args:
            counts: of each sample, [num_cells] in the order of `exact.prefixes`.
        """
        cells = exact.cells
        num_samples = len(counts)
        num_draws = round(np.sum(counts[-1]))
        results = [chi_square_test(each, cells, MIN_EXPECTED) for each in counts]

        def noncentrality(other_cells: Floats) -> float:
            distance = chi_square_distance(
                probabilities=cells,
                other_probabilities=other_cells,
                num_draws=num_draws,
                min_expected=MIN_EXPECTED,
            )
            return num_draws / num_samples * distance

        second_token = noncentrality(exact.shifted_cells(1, self.shift))
        third_token = noncentrality(exact.shifted_cells(2, self.shift))
        return SampledCheck(
            significance_level=SHARE_OF_LEVEL * self.level_share,
            num_draws=num_draws,
            statistic=sum(result.statistic for result in results),
            degrees_of_freedom=results[0].degrees_of_freedom,
            rounding=ROUNDING_ALLOWANCE * noncentrality(exact.cached_cells),
            visible=np.array([second_token, third_token]),
            acceptance=acceptance,
        )
