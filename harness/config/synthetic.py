"""Acceptance rates that a user asks for, by `decoding.synthetic_acceptance`, and those of other runs' profiles.

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

import json
import math
import sys
from collections.abc import Sequence
from itertools import accumulate, pairwise
from operator import mul
from pathlib import Path
from typing import Any, TypeGuard

from harness.config.errors import SettingError

# What is asked for, in one of the three forms above.
Rates = float | tuple[float, ...]

# The key, under `harness`, of the rates that a run with trees writes into its profile and that
# `rank_rates_of_profile` reads.
RATES_BY_RANK = "accept_rates_by_rank"
# Beside `accept_rates_of_tested`: the share of iterations that tested each position.
TESTED_SHARES = "tested_shares"
# Other tools round to two decimals at least. More than that is a contradiction.
_ROUNDING = 0.01

_SETTING = "synthetic_acceptance"
_NO_PROFILE = "must be a number, a list of rates, or a speculation_profile.json"


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


def length_deviation(rates: Rates, num_draft_tokens: int) -> float:
    """The standard deviation of an iteration's tokens that follows from the rates."""
    conditional = conditional_rates(rates, num_draft_tokens)
    marginal = marginal_rates(conditional, num_draft_tokens)
    mean = sum(marginal)
    # A length of at least i tokens adds i² - (i - 1)² to the square.
    square = sum((2 * place - 1) * rate for place, rate in enumerate(marginal, start=1))
    return math.sqrt(max(0.0, square - mean * mean))


def for_vllm(marginal: Sequence[float]) -> dict[str, Any]:
    """Entries of vLLM's `--speculative-config`, whose rates are those of whole prefixes."""
    return {
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": [round(rate, 6) for rate in marginal],
    }


def for_llama_cpp(marginal: Sequence[float]) -> str:
    """Flags of `llama-server`, whose rates are those of whole prefixes.

    They came with pull request 27711 of ggml-org/llama.cpp.
    """
    return f"--spec-synth-rates {','.join(f'{rate:.6g}' for rate in marginal)}"


def rates_of_profile(path: str) -> Rates:
    """The rates of a `speculation_profile.json`; the mean length of one without rates.

    It may have marginal and conditional rates and a mean length, and one of ours has rates of the
    tested tokens under `harness`, with the share of iterations that tested each position. Each
    follows from the others, so that a file in which only one was edited is refused.

    Raises:
        SettingError: there is no such file, it is no profile of a measurement, or it contradicts
            itself.
    """
    profile = _profile(_SETTING, path, _NO_PROFILE)
    own = profile.get("harness")
    own = own if isinstance(own, dict) else {}
    conditional = _rates_in(profile, "conditional_accept_rates", path)
    marginal = _rates_in(profile, "marginal_accept_rates", path)
    length = profile.get("mean_accept_length")
    if not conditional and not marginal:
        # An empty list of rates means that nothing was drafted, so that a length would mean nothing.
        if conditional is None and marginal is None and _is_number(length):
            if not length >= 1:  # nan, too
                rule = f"has a mean_accept_length of {length:g}, which must be at least 1"
                raise SettingError(_SETTING, rule, path)
            # A length of 1 is the target's own token alone; as a rate, 1 would accept everything.
            return float(length) if length > 1 else 0.0
        raise SettingError(_SETTING, "is a profile without acceptance rates", path)
    if not marginal:
        assert conditional is not None
        marginal = tuple(accumulate(conditional, mul))
    earlier = (1.0, *marginal[:-1])
    if any(later > rate + _ROUNDING for rate, later in pairwise(marginal)):
        raise SettingError(_SETTING, "has marginal_accept_rates that rise", path)
    if conditional and not _agree(conditional, earlier, marginal):
        rule = "has marginal_accept_rates and conditional_accept_rates that contradict each other"
        raise SettingError(_SETTING, rule, path)
    implied = 1 + sum(marginal)
    most_off = _ROUNDING * (len(marginal) + 1)
    if length is not None and not (_is_number(length) and abs(length - implied) <= most_off):
        rule = f"has a mean_accept_length of {length}, and {implied:.4g} by its rates"
        raise SettingError(_SETTING, rule, path)
    tested = _rates_in(own, "accept_rates_of_tested", path)
    if tested:
        # Where no proposal ended early, a position was tested whenever the one before was accepted.
        shares = _rates_in(own, TESTED_SHARES, path) or earlier
        if not _agree(tested, shares, marginal):
            rule = (
                "has accept_rates_of_tested that differ from marginal_accept_rates: was it edited?"
            )
            raise SettingError(_SETTING, rule, path)
        return tested
    if conditional:
        return conditional
    return tuple(
        min(1.0, rate / before) if before else 0.0
        for rate, before in zip(marginal, earlier, strict=True)
    )


def _agree(rates: Sequence[float], shares: Sequence[float], marginal: Sequence[float]) -> bool:
    """Whether rates of the iterations in these shares make the marginal rates, but for rounding."""
    if not len(rates) == len(shares) == len(marginal):
        return False
    return all(
        abs(rate * share - whole) <= _ROUNDING
        for rate, share, whole in zip(rates, shares, marginal, strict=True)
    )


def rank_rates_of_profile(path: str) -> tuple[float, ...]:
    """How often the first, second, ... child of a node was accepted in a run with trees: `draft.rates`.

    Raises:
        SettingError: there is no such file, or it is no profile of a run with trees.
    """
    profile = _profile("rates", path, "must be a list of rates, or a speculation_profile.json")
    own = profile.get("harness")
    rates = _rates_in(own, RATES_BY_RANK, path, "rates") if isinstance(own, dict) else None
    if not rates:
        raise SettingError("rates", "is the profile of a run without trees", path)
    return rates


def _profile(setting: str, path: str, rule: str) -> dict[str, Any]:
    if not path.endswith(".json"):
        raise SettingError(setting, rule, path)
    try:
        profile = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingError(setting, f"cannot be read: {error.strerror}", path) from None
    except (ValueError, RecursionError):
        raise SettingError(setting, "is not a JSON file", path) from None
    if not isinstance(profile, dict) or "schema_version" not in profile:
        raise SettingError(setting, f"{rule}: it has no schema_version", path)
    if profile.get("measured") is not True:
        raise SettingError(setting, "is a profile without a measurement", path)
    return profile


def _rates_in(
    entries: dict[str, Any], name: str, path: str, setting: str = _SETTING
) -> tuple[float, ...] | None:
    """A list of rates in a profile, which may be empty; None without the entry."""
    rates = entries.get(name)
    if rates is None:
        return None
    if not isinstance(rates, list) or not all(
        _is_number(rate) and 0 <= rate <= 1 for rate in rates
    ):
        raise SettingError(setting, f"has {name} that are no rates in [0, 1]", path)
    return tuple(float(rate) for rate in rates)


def _is_number(value: Any) -> TypeGuard[float]:
    """Whether a value of a JSON file is a number that a float can hold."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and not abs(value) > sys.float_info.max
