"""Is an arm lossless? Two tests that judge it by its tokens alone, so that any arm can be put to them.

Greedy, its tokens must be the regular arm's. Sampled, the first tokens of many continuations of one prompt must follow
the target's exact distribution.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from harness.decoding.loops import Request
from harness.decoding.protocols import Runner
from harness.decoding.randomness import uniforms
from harness.decoding.warp import Warp
from harness.experiments.arms import Arm
from harness.experiments.divergence import Divergence, first_divergence
from harness.experiments.outcomes import Floats, Outcomes
from harness.experiments.timing import generate
from harness.results.acceptance import Acceptance
from harness.results.statistics import (
    chi_square_distance,
    chi_square_p_value,
    chi_square_tail_power,
    chi_square_test,
)

Verdict = Literal["lossless", "lossy", "undecided"]

# Fewest draws that a cell of the χ² test is expected to get. Far out in the tail the χ² approximation is too eager, and
# the more so the rarer the cells: with 100 the true false-alarm rate at a nominal 1e-11 is 3e-10 (exact binomial sums
# of two cells). So each test is held at a hundredth of its share, and the stated rate is not exceeded.
MIN_EXPECTED = 100
SHARE_OF_LEVEL = 0.01
# Less than this chance of seeing the stated shift, and silence proves nothing.
REQUIRED_POWER = 0.99
# The null may lie twice as far from the exact distribution as two ways of computing that lie apart: the loop's forward
# passes have other shapes again. In float32 this is nothing; in half precision it is most of the threshold.
ROUNDING_ALLOWANCE = 4.0


@dataclass(frozen=True)
class GreedyCheck:
    """Whether greedy texts are the regular arm's.

    Attributes:
        num_tokens: compared, over all prompts.
        divergences: a prompt each; None where the texts are the same.
        rounding: `logit_rounding` of the target.
    """

    num_tokens: int
    divergences: Sequence[Divergence | None]
    rounding: float

    @property
    def num_identical(self) -> int:
        return sum(divergence is None for divergence in self.divergences)

    @property
    def worst(self) -> Divergence | None:
        """The divergence that rounding explains least."""
        parted = [divergence for divergence in self.divergences if divergence is not None]
        return max(parted, key=lambda d: abs(d.logit_margin) / self.tolerance(d), default=None)

    @property
    def verdict(self) -> Verdict:
        worst = self.worst
        return "lossless" if worst is None or abs(worst.logit_margin) <= self.tolerance(worst) else "lossy"

    def tolerance(self, divergence: Divergence) -> float:
        """The largest logit margin there that rounding explains."""
        return max(self.rounding * divergence.largest_logit, 1e-30)


@dataclass(frozen=True)
class SampledCheck:
    """Whether sampled continuations follow the exact distribution: of one prompt, or of several together.

    Attributes:
        num_tokens: counted of each continuation.
        num_draws: continuations,
        num_prompts: of so many prompts.
        significance_level: a p-value below it calls the arm lossy.
        statistic: of the χ² test.
        degrees_of_freedom: one less than the cells, for each prompt.
        rounding: part of the statistic that the test puts down to rounding.
        visible: what the stated shift of the second token's distribution, or of the third's, would add to the
            statistic. The first token is the target's own, the second is where a proposal is tested, and the third
            follows an acceptance (with one draft token it is the bonus token) or a roll-back.
        acceptance: of the draft tokens behind the draws: without rejections, much of the algorithm was never at work.
    """

    num_tokens: int
    num_draws: int
    significance_level: float
    statistic: float
    degrees_of_freedom: int
    rounding: float
    visible: tuple[float, float]
    acceptance: Acceptance
    num_prompts: int = 1

    @property
    def p_value(self) -> float:
        return chi_square_p_value(self.statistic, self.degrees_of_freedom, self.rounding)

    @property
    def power(self) -> float:
        """Chance that the test sees the shift of whichever token it sees less."""
        alpha = self.significance_level
        return chi_square_tail_power(self.degrees_of_freedom, min(self.visible), alpha, self.rounding)

    @property
    def verdict(self) -> Verdict:
        if self.p_value < self.significance_level:
            return "lossy"
        return "lossless" if self.power >= REQUIRED_POWER else "undecided"


def together(checks: Sequence[SampledCheck]) -> SampledCheck:
    """Independent checks as one: a small loss everywhere shows in the sum before it shows in any part."""
    return SampledCheck(
        checks[0].num_tokens,
        sum(check.num_draws for check in checks),
        checks[0].significance_level,
        sum(check.statistic for check in checks),
        sum(check.degrees_of_freedom for check in checks),
        sum(check.rounding for check in checks),
        (sum(check.visible[0] for check in checks), sum(check.visible[1] for check in checks)),
        sum((check.acceptance for check in checks), Acceptance()),
        sum(check.num_prompts for check in checks),
    )


def logit_rounding(dtype: torch.dtype, quantized_activations: bool = False) -> float:
    """How far two computations of a logit margin lie apart by rounding alone, relative to the largest logit.

    4 units of the format in half precision, where rounding the logits themselves is most of it; 16 in float32, where
    the roundings of all layers add up (0.9 and 6 a logit were seen in 24 layers). With activations in 8 bits it is
    4 steps of those, whatever the format of the rest.
    """
    if quantized_activations:
        return 4 / 127
    return (4 if torch.finfo(dtype).bits == 16 else 16) * torch.finfo(dtype).eps


def check_greedy(regular: Arm, arm: Arm, target: Runner, requests: Sequence[Request], rounding: float) -> GreedyCheck:
    """Compare the texts of two arms; the requests must be greedy. Where texts part, `target` tells the logit margin."""
    divergences = []
    num_tokens = 0
    for request in requests:
        texts, others = generate(regular, request, []).tokens, generate(arm, request, []).tokens
        num_tokens += sum(map(len, texts))
        for prompt, expected, actual in zip(request.prompts, texts, others, strict=True):
            divergences.append(first_divergence(target, prompt, expected, actual))
    return GreedyCheck(num_tokens, divergences, rounding)


def check_sampled(
    arm: Arm,
    prompt: Sequence[int],
    outcomes: Outcomes,
    warp: Warp,
    *,
    num_tokens: int,
    num_draws: int,
    significance_level: float,
    shift: float,
    seed: int,
    first_stream: int = 0,
    batch_size: int = 512,
    device: torch.device | str = "cpu",
    advance: Callable[[], None] = lambda: None,
) -> SampledCheck:
    """Draw continuations of `prompt` from `arm` and hold them against `outcomes`, the exact ones.

    Args:
        first_stream: the draws take the streams of random numbers from this one on; tests of one run share none.
        device: where the arm wants its random numbers.
        advance: called after each batch.
    """
    outcomes = outcomes.first(num_tokens)
    counts, acceptance = outcomes.count([]), Acceptance()
    for first in range(0, num_draws, batch_size):
        streams = range(first_stream + first, first_stream + min(first + batch_size, num_draws))
        request = Request(
            prompts=[prompt] * len(streams),
            uniforms=uniforms(seed, streams, num_tokens + 1, device),
            warp=warp,
            max_new_tokens=num_tokens,
        )
        generation = generate(arm, request, [])
        counts += outcomes.count(generation.tokens)
        acceptance += generation.acceptance
        advance()
    exact = outcomes.probabilities

    def noncentrality(other: Floats) -> float:
        return num_draws * chi_square_distance(exact, other, num_draws, MIN_EXPECTED)

    result = chi_square_test(counts, exact, MIN_EXPECTED)
    return SampledCheck(
        num_tokens,
        num_draws,
        SHARE_OF_LEVEL * significance_level,
        result.statistic,
        result.degrees_of_freedom,
        ROUNDING_ALLOWANCE * noncentrality(outcomes.cached_probabilities),
        (noncentrality(outcomes.shifted(1, shift)), noncentrality(outcomes.shifted(2, shift))),
        acceptance,
    )
