"""Computes, without decoding, the expected iterations into which speculative decoding cuts a text that the target
wrote.

The result is exact, for every K.

Speculative decoding with a lossless rule emits a text with the same probability as the target alone. Suppose that an
iteration begins after token s. The probability that the draft's next token is accepted *and* equals the text's next
token y is draft(y) min(1, target(y) / draft(y)) = min(draft(y), target(y)). The text's next token is y with the
probability target(y). So, given that it is y, a draft token is accepted with the probability

    a = min(1, draft(y) / target(y))                 (Leviathan et al. 2023, arXiv:2211.17192)

After this token, the same holds again, because the rest of the text also has the target's probability.

Let a(s, j) be the probability that draft token j of an iteration that begins after token s is accepted, if the draft
tokens before it were accepted. With these probabilities, the cut is a renewal process. Let k = min(K, tokens left - 1).
In an iteration that begins after token s, m draft tokens are accepted, and so m + 1 tokens decided, with the
probability

    P(s, m) = a(s, 0) ... a(s, m - 1) (1 - a(s, m))    for m < k
            = a(s, 0) ... a(s, k - 1)                    for m = k

An iteration begins after token t with the probability

    v(t) = sum over s of v(s) P(s, t - s - 1)

v(t) is also the probability that token t comes from the target and not from the draft. The sum of v is the expected
number of iterations. The mean and the mean square of the number of iterations are computed in the same pass. They give
its variance, which comes from the randomness of accepting.

Block verification (Sun et al. 2024, arXiv:2403.10444) has the same form. h is 1 at the beginning of an iteration. The
probability that the first i draft tokens are y_1 to y_i and are accepted is draft(y_1..i) h_i. The token after them is
still y with the probability target(y). So each token is accepted with the probability a, and h' is the next h:

    a  = min(1, draft(y) / (h target(y)))
    h' = min(1, h target(y) / draft(y))

If the draft's probabilities do not depend on where the iteration began, as for a draft model, then a(s, j) = a(s + j).
Greedy decoding is the case in which all probabilities are 0 or 1. Lenience below 1 (a rule that accepts more draft
tokens than a lossless rule) cannot be computed in this way above temperature 0: its texts do not have the target's
probabilities, and the probability of a text depends on K.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from harness.results.statistics import Floats
from harness.results.statistics.interval import Interval
from harness.results.statistics.ratios import ExtraIterations, ratio_of_totals, totals_by_unit


@dataclass(frozen=True)
class Cut:
    """A text of n tokens, cut into iterations, for each number of draft tokens K from 1 to M.

    Attributes:
        num_tokens: number of tokens that iterations decided, n - 1: the first token comes from the pass over the
            prompt.
        iterations: [M], expected number of iterations.
        variance: [M], variance of the number of iterations over repeated decoding of the same text.
        accepted_at: [M, M], for each K, the expected number of iterations that accept the draft token at each position.
        drafting: [M], expected number of iterations that propose at least one token.
        proposed: [M], expected number of draft tokens.
        tested_at: [M, M], for each K, the expected number of iterations in which verification tests the draft token at
            each position. The tested tokens are the accepted ones and the first rejected one.
    """

    num_tokens: int
    iterations: Floats
    variance: Floats
    accepted_at: Floats
    drafting: Floats
    proposed: Floats
    tested_at: Floats


def acceptance_chances(target: ArrayLike, draft: ArrayLike, *, block: bool = False) -> Floats:
    """The probabilities a(s, j), [n - 1, M], that a draft token is accepted if the draft tokens before it were; nan
    where no token is offered.

    For example, the target gives the three tokens of a text the probabilities [0.1, 0.5, 0.2], and a draft model gives
    the last two [0.2, 0.4]. For K up to 2, `draft` is [[0.2, 0.4], [0.4, nan]], and the result [[0.4, 1], [1, nan]].

    Args:
        target: [n], the target's probability of each token of the text.
        draft: [n - 1, M]. Entry (s, j) is the draft's probability of token s + 1 + j in an iteration that begins after
            token s. It is nan if the draft offers no token there, and beyond the end of the text.
        block: whether the rule is block verification.
    """
    target_chances = np.asarray(target, dtype=np.float64)
    draft_chances = np.asarray(draft, dtype=np.float64)
    num_places = len(target_chances) - 1
    most = draft_chances.shape[1]
    beyond = np.full(most, np.nan)
    windows = np.lib.stride_tricks.sliding_window_view(np.append(target_chances[1:], beyond), most)
    targets = windows[:num_places]
    # The factor h of block verification.
    surplus = np.ones(num_places)
    chances = np.empty_like(draft_chances)
    with np.errstate(divide="ignore", invalid="ignore"):
        for index in range(most):
            # A token that the target cannot draw is never accepted.
            wanted = np.where(targets[:, index] == 0, np.inf, targets[:, index] * surplus)
            chances[:, index] = np.minimum(1, draft_chances[:, index] / wanted)
            if block:
                # `fmin` ignores nan: where no token is offered, the surplus is not used any more.
                surplus = np.fmin(1, wanted / draft_chances[:, index])
    return chances


def cut(chances: ArrayLike) -> Cut:
    """Cut a text into iterations, for every K from 1 to M.

    For example, a text has 3 tokens, M is 1, and the chances are [[0.4], [1]]. The last token is never drafted, so its
    chance is ignored. The first iteration decides both tokens after the first with the probability 0.4. So `iterations`
    is [1.6], and `accepted_at` is [[0.4]].

    Args:
        chances: [n - 1, M], the result of `acceptance_chances`.
    """
    accepting = np.asarray(chances, dtype=np.float64)
    num_places, most = accepting.shape
    numbers = np.arange(1, most + 1)
    # [n - 1]: the number of draft tokens that can be offered after token s; at most the number of tokens left minus 1.
    offered = np.cumprod(~np.isnan(accepting), axis=1).sum(axis=1)
    offered = np.minimum(offered, np.arange(num_places)[::-1])
    # [3, M, n + M]. For each token: the probability that an iteration begins after it; and, if one does, the expected
    # number of iterations before it and the expected square of this number, both multiplied by that probability.
    moments = np.zeros((3, most, num_places + most + 1))
    moments[0, :, 0] = 1
    drafting, proposed = np.zeros((2, most))
    accepted_at, tested_at = np.zeros((2, most, most))
    for index in range(num_places):
        limits = np.minimum(numbers, offered[index])
        reached = np.append(1, np.cumprod(accepting[index]))
        # [M, M + 1], the probability that at least 0, 1, ... draft tokens are accepted; `ends`: exactly 0, 1, ... With
        # chances of 0.4 and 0.5, `reach` is [[1, 0.4, 0], [1, 0.4, 0.2]] for K=1 and K=2, and `ends` is
        # [[0.6, 0.4, 0], [0.6, 0.2, 0.2]].
        reach = np.where(np.arange(most + 1) <= limits[:, np.newaxis], reached, 0)
        ends = -np.diff(reach, axis=1, append=0)
        visits, counts, squares = moments[:, :, index]
        # With one more iteration: the expected numbers are E[i + 1], and E[(i + 1)^2] = E[i^2] + 2 E[i] + 1.
        counted = np.stack([visits, counts + visits, squares + 2 * counts + visits])
        # An iteration that accepts m draft tokens ends after token index + 1 + m, and the next one begins there.
        moments[:, :, index + 1 : index + most + 2] += counted[:, :, np.newaxis] * ends
        accepted_at += visits[:, np.newaxis] * reach[:, 1:]
        drafting += visits * (limits > 0)
        proposed += visits * limits
        offers = np.arange(most) < limits[:, np.newaxis]
        tested_at += visits[:, np.newaxis] * reach[:, :-1] * offers
    # Every cut ends after the last token, so the probability there is 1, and the moments need no division by it.
    _, mean, square = moments[:, :, num_places]
    return Cut(
        num_tokens=num_places,
        iterations=mean,
        variance=np.maximum(square - mean**2, 0),
        accepted_at=accepted_at,
        drafting=drafting,
        proposed=proposed,
        tested_at=tested_at,
    )


def fewest_iterations(num_tokens: ArrayLike, num_draft_tokens: int) -> Floats:
    """The number of iterations that decide texts of these numbers of tokens if every draft token is accepted."""
    return np.ceil(np.asarray(num_tokens) / (num_draft_tokens + 1))


def expected_tokens_per_iteration(
    cuts: Sequence[Cut], prompts: Sequence[Hashable], unit: str = "prompt"
) -> list[Interval]:
    """Tokens per iteration for each K, over all texts together, with a 95 % interval over prompts.

    Like the interval of a measured run, it covers the choice of prompts, and of the texts that the target draws after
    each prompt. Unlike that interval, it does not cover the randomness of accepting, because the numbers of iterations
    are expected values. Texts of the same prompt are not independent, so their totals form one unit. If hardly any unit
    has a rejection, the lower bound allows for rejections that the texts may have missed (`ExtraIterations`).

    Args:
        cuts: [num_texts], the cut of each text. Texts must have at least two tokens, because a text of one token has no
            iterations.
        prompts: [num_texts], the prompt that each text answers.
        unit: the name of a unit in the interval's coverage.

    Returns:
        [M], for K from 1 to M.
    """
    num_tokens = [text.num_tokens for text in cuts]
    tokens = totals_by_unit(num_tokens, prompts)
    iterations = np.stack([text.iterations for text in cuts])
    intervals = []
    for k, iterations_at_k in enumerate(iterations.T, start=1):
        fewest = fewest_iterations(num_tokens, k)
        totals = totals_by_unit(iterations_at_k, prompts)
        extra = ExtraIterations(totals, totals_by_unit(fewest, prompts))
        intervals.append(ratio_of_totals([tokens], [totals], unit, extra_iterations=extra))
    return intervals


def expected_acceptance(cuts: Sequence[Cut], num_draft_tokens: int) -> dict[str, Any]:
    """The columns about acceptance that follow from the cuts for one K, by name; {} if nothing was proposed."""
    index = num_draft_tokens - 1
    drafting = sum(text.drafting[index] for text in cuts)
    if not drafting:
        return {}
    # Each iteration decides one token in addition to the accepted draft tokens.
    accepted = sum(text.num_tokens - text.iterations[index] for text in cuts)
    accepted_at = np.sum([text.accepted_at[index] for text in cuts], axis=0)[:num_draft_tokens]
    return {
        "acceptance_rate": accepted / sum(text.proposed[index] for text in cuts),
        "conditional_acceptance_rate": accepted / sum(text.tested_at[index].sum() for text in cuts),
        "mean_acceptance_length": 1 + accepted / drafting,
        "marginal_acceptance_by_position": [
            round(float(rate), 4) for rate in accepted_at / drafting
        ],
    }
