"""Acceptance rates that a user asks for, by `decoding.synthetic_acceptance`.

What is asked for has three forms, which `conditional_rates` turns into one: the chance at each draft
position that a token is accepted if those before it were, of which the last holds for all later
positions. Engines take marginal rates: the chance that a token and all before it are accepted.

| asked for, with K=3 | conditional | marginal | mean acceptance length |
|---|---|---|---|
| 0.8, for every position | 0.8 | 0.8, 0.64, 0.512 | 2.95 |
| [0.9, 0.5] | 0.9, 0.5 | 0.9, 0.45, 0.225 | 2.575 |
| 2.95, a mean length (above 1) | 0.8 | 0.8, 0.64, 0.512 | 2.95 |

The mean length counts the target's own token: 1 + the sum of the marginal rates.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from typing import Any, TypeGuard

from harness.config.errors import SettingError

# What is asked for, in one of the three forms above.
Rates = float | tuple[float, ...]

_SETTING = "synthetic_acceptance"


def rates_of_row(value: Any) -> Rates:
    """The rates in a cell of a row, which has a list where the settings have a tuple."""
    return tuple(value) if isinstance(value, list) else value


def is_length(rates: Rates) -> TypeGuard[float]:
    """Whether a mean acceptance length is asked for, and no rate."""
    return not isinstance(rates, tuple) and rates > 1


def check_rates(rates: Rates, num_draft_tokens: int | str) -> None:
    """Raise a SettingError for a rate that is no probability, or a length that K tokens cannot have."""
    if isinstance(rates, tuple):
        if not rates or not all(0 <= rate <= 1 for rate in rates):
            raise SettingError(_SETTING, "must have rates in [0, 1], one or more", rates)
        return
    if rates > 1:
        if num_draft_tokens == "auto":
            rule = "must be in [0, 1], because a mean length (above 1) needs a K that is a number"
            raise SettingError(_SETTING, rule, rates)
        longest = int(num_draft_tokens) + 1
        if rates > longest:
            rule = f"must be in [0, 1], or a mean length of at most K + 1 = {longest}"
            raise SettingError(_SETTING, rule, rates)
    if not rates >= 0:  # nan, too
        raise SettingError(_SETTING, "must be in [0, 1], or a mean length above 1", rates)


def conditional_rates(rates: Rates, num_draft_tokens: int) -> tuple[float, ...]:
    """Chance at each position that a token is accepted if those before it were; the last one holds on.

    A mean length becomes one rate for all positions, as a draft's own rates are nearly equal.
    """
    if isinstance(rates, tuple):
        return rates
    if rates <= 1:
        return (rates,)
    if rates == num_draft_tokens + 1:
        return (1.0,)
    from scipy.optimize import brentq

    powers = range(num_draft_tokens + 1)
    rate = brentq(lambda rate: sum(rate**power for power in powers) - rates, 0.0, 1.0)
    return (float(rate),)


def marginal_rates(conditional: Sequence[float], num_draft_tokens: int) -> list[float]:
    """Chance at each of K positions that a token and all before it are accepted."""
    num_missing = num_draft_tokens - len(conditional)
    rates = [*conditional, *[conditional[-1]] * num_missing][:num_draft_tokens]
    return list(accumulate(rates, mul))


def mean_length(rates: Rates, num_draft_tokens: int) -> float:
    """The mean acceptance length that follows from the rates, with K draft tokens each time."""
    conditional = conditional_rates(rates, num_draft_tokens)
    return 1 + sum(marginal_rates(conditional, num_draft_tokens))


def length_in_answers(
    conditional: Sequence[float], num_draft_tokens: int, num_tokens: float
) -> float:
    """Tokens per iteration of answers of `num_tokens`, whose last iterations draft no more than is left of them.

    By renewal, exactly: what is left after an iteration is an answer again. The first token comes with the prompt.
    """
    reached = [1.0, *marginal_rates(conditional, num_draft_tokens)]
    num_decoded = max(1, round(num_tokens) - 1)
    expected = [0.0]
    for left in range(1, num_decoded + 1):
        most = min(num_draft_tokens, left - 1)
        further = reached[most] * expected[left - 1 - most]
        for accepted in range(most):
            chance = reached[accepted] - reached[accepted + 1]
            further += chance * expected[left - 1 - accepted]
        expected.append(1 + further)
    return num_decoded / expected[-1]


def at_length(tokens: float, num_draft_tokens: int, length: float, other: float) -> float:
    """Tokens per iteration of answers of another length than these are of, as if all draft tokens had one rate."""
    from scipy.optimize import brentq

    def excess(rate: float) -> float:
        return length_in_answers([rate], num_draft_tokens, length) - tokens

    rate = float(brentq(excess, 0.0, 1.0)) if excess(1.0) > 0 > excess(0.0) else float(tokens > 1)
    length_at_rate = length_in_answers([rate], num_draft_tokens, length)
    return tokens * length_in_answers([rate], num_draft_tokens, other) / length_at_rate
