"""Acceptance at given rates, and the tokens per iteration that follow from rates.

Conditional rates are the chance at each draft position that a token is accepted if those before it were; the last one
holds for all later positions. Marginal rates are the chance that a token and all before it are accepted: 0.9 and 0.5
give 0.9, 0.45 and 0.225 with K=3, and a mean acceptance length of 1 + their sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

# Beyond this length of answers, tokens per iteration differ by less than 0.1 %.
_LONGEST = 10_000


def marginal_rates(conditional: Sequence[float], num_draft_tokens: int) -> list[float]:
    """Chance at each of K positions that a token and all before it are accepted."""
    num_missing = num_draft_tokens - len(conditional)
    rates = [*conditional, *[conditional[-1]] * num_missing][:num_draft_tokens]
    return list(accumulate(rates, mul))


def length_in_answers(
    conditional: Sequence[float], num_draft_tokens: int, num_tokens: float
) -> float:
    """Tokens per iteration of answers of `num_tokens`, whose last iterations draft no more than is left of them.

    By renewal, exactly: what is left after an iteration is an answer again. The first token comes with the prompt.
    """
    reached = [1.0, *marginal_rates(conditional, num_draft_tokens)]
    num_decoded = max(1, round(min(num_tokens, _LONGEST)) - 1)
    # Expected iterations of what is left, by its length.
    iterations = [0.0]
    for left in range(1, num_decoded + 1):
        most = min(num_draft_tokens, left - 1)
        later = reached[most] * iterations[left - 1 - most]
        for accepted in range(most):
            chance = reached[accepted] - reached[accepted + 1]
            later += chance * iterations[left - 1 - accepted]
        iterations.append(1 + later)
    return num_decoded / iterations[-1]


def change_with_length(
    tokens: float, num_draft_tokens: int, measured: float, asked: float
) -> float:
    """The factor of tokens per iteration from answers of one length to those of another.

    As if all draft tokens had one rate, the one that gives `tokens`.

    Args:
        tokens: per iteration, of answers of the length `measured`.
    """
    from scipy.optimize import brentq

    def excess(rate: float) -> float:
        return length_in_answers([rate], num_draft_tokens, measured) - tokens

    rate = float(brentq(excess, 0.0, 1.0)) if excess(1.0) > 0 > excess(0.0) else float(tokens > 1)
    now, then = (
        length_in_answers([rate], num_draft_tokens, length) for length in (measured, asked)
    )
    return then / now
