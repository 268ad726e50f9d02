"""Acceptance that is asked for: what `decoding.synthetic_acceptance` may be, as a rate for each draft position."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

from harness.config.errors import SettingError

# One rate for every position; above 1 a mean acceptance length; a rate for each position.
Rates = float | tuple[float, ...]

_SETTING = "synthetic_acceptance"
_NO_PROFILE = "must be a number, a list of rates, or a speculation_profile.json"


def check_rates(asked: Rates, num_draft_tokens: int | str) -> None:
    """Raises SettingError for a rate that is no probability, or a length that K tokens cannot have."""
    if isinstance(asked, tuple):
        if not asked or not all(0 <= rate <= 1 for rate in asked):
            raise SettingError(_SETTING, "must have rates in [0, 1], one or more", asked)
        return
    if asked > 1:
        if num_draft_tokens == "auto":
            rule = "must be in [0, 1], because a mean length (above 1) needs a K that is a number"
            raise SettingError(_SETTING, rule, asked)
        longest = int(num_draft_tokens) + 1
        if asked > longest:
            rule = f"must be in [0, 1], or a mean length of at most K + 1 = {longest}"
            raise SettingError(_SETTING, rule, asked)
    if asked < 0:
        raise SettingError(_SETTING, "must be in [0, 1], or a mean length above 1", asked)


def conditional_rates(asked: Rates, num_draft_tokens: int) -> tuple[float, ...]:
    """Chance at each position that a token is accepted if those before it were.

    The last rate holds for all later positions. A mean length becomes one rate for all positions,
    as a draft's own rates are nearly equal.
    """
    if isinstance(asked, tuple):
        return asked
    if asked <= 1:
        return (asked,)
    if asked == num_draft_tokens + 1:
        return (1.0,)
    from scipy.optimize import brentq

    powers = range(num_draft_tokens + 1)
    rate = brentq(lambda rate: sum(rate**power for power in powers) - asked, 0.0, 1.0)
    return (float(rate),)


def marginal_rates(conditional: Sequence[float], num_draft_tokens: int) -> list[float]:
    """Chance at each of K positions that a token and all before it are accepted."""
    missing = num_draft_tokens - len(conditional)
    rates = [*conditional, *[conditional[-1]] * missing][:num_draft_tokens]
    return list(accumulate(rates, mul))


def rates_of_profile(path: str) -> Rates:
    """The rates of a `speculation_profile.json`; the mean length of one without rates.

    Raises:
        SettingError: there is no such file, or it is no profile of a measurement.
    """
    if not path.endswith(".json"):
        raise SettingError(_SETTING, _NO_PROFILE, path)
    try:
        profile = json.loads(Path(path).read_text())
    except OSError as error:
        raise SettingError(_SETTING, f"cannot be read: {error.strerror}", path) from None
    except (ValueError, RecursionError):
        raise SettingError(_SETTING, "is not a JSON file", path) from None
    if not isinstance(profile, dict) or "schema_version" not in profile:
        raise SettingError(_SETTING, f"{_NO_PROFILE}: it has no schema_version", path)
    if not profile.get("measured"):
        raise SettingError(_SETTING, "is a profile without a measurement", path)
    return _rates(profile, path)


def _rates(profile: dict[str, Any], path: str) -> Rates:
    own = profile.get("harness")
    tested = own.get("accept_rates_of_tested") if isinstance(own, dict) else None
    rates = tested or profile.get("conditional_accept_rates")
    if isinstance(rates, list) and all(isinstance(rate, int | float) for rate in rates) and rates:
        return tuple(float(rate) for rate in rates)
    length = profile.get("mean_accept_length")
    if rates is None and isinstance(length, int | float):
        return float(length)
    raise SettingError(_SETTING, "is a profile without acceptance rates", path)
