"""How large a difference a measurement can show, and how many units would show a smaller one.

`latency` says so below its speed-up: over 15 prompts, a difference of 10 % shows in 80 % of such runs.
"""

from __future__ import annotations

import bisect
import math

from harness.results.statistics.distributions import t_quantile, t_tail
from harness.results.statistics.interval import CONFIDENCE, FEWEST_FOR_INTERVAL
from harness.results.statistics.runs import RatioEstimate

# How often a visible difference leads to an interval that excludes 1.
_POWER = 0.8
# More prompts than anyone measures.
_MOST_UNITS = 1_000_000


def chance_to_see(estimate: RatioEstimate, ratio: float) -> float:
    """Power: the chance that an interval like this one excludes 1 if this were the ratio.

    Both sides count. nan without an interval.
    """
    error = estimate.standard_error
    freedom = estimate.degrees_of_freedom
    if error == 0:
        return float(ratio != 1)
    quantile = t_quantile((1 - CONFIDENCE) / 2, freedom)
    shift = abs(math.log(ratio)) / error
    return t_tail(quantile - shift, freedom) + t_tail(quantile + shift, freedom)


def visible_difference(estimate: RatioEstimate) -> float:
    """The smallest difference, as a share, that is found in 80 % of the cases.

    The usual sum of two quantiles of Student's distribution, in standard errors (Miller, "Adding
    Error Bars to Evals", 2024, with the normal one).

    Args:
        estimate: a measurement (`ratio_over_runs`), or a change between two (`change_between`).

    Returns:
        Such as 0.041 for a ratio of 1.041; nan without an interval.
    """
    freedom = estimate.degrees_of_freedom
    num_errors = t_quantile((1 - CONFIDENCE) / 2, freedom) + t_quantile(1 - _POWER, freedom)
    return math.expm1(num_errors * estimate.standard_error)


def units_needed(estimate: RatioEstimate, difference: float) -> int | None:
    """How many units would show this difference, with as many runs.

    Returns:
        At least `FEWEST_FOR_INTERVAL`; None where no number would, because runs differ too much.

    Raises:
        ValueError: for a difference that is not positive.
    """
    if difference <= 0:
        raise ValueError(f"the difference must be positive: {difference}")
    if not estimate.has_interval:
        return None

    def shows(num_units: int) -> bool:
        return visible_difference(estimate.with_units(num_units)) <= difference

    numbers = range(FEWEST_FOR_INTERVAL, _MOST_UNITS + 1)
    place = bisect.bisect_left(numbers, True, key=shows)
    return numbers[place] if place < len(numbers) else None


def reach_columns(estimate: RatioEstimate) -> dict[str, float | None]:
    """The columns about how small a difference would show; None where there is no interval."""
    if not estimate.has_interval:
        return {"visible_difference": None, "units_for_half": None}
    visible = visible_difference(estimate)
    enough = units_needed(estimate, visible / 2) if visible > 0 else None
    return {"visible_difference": visible, "units_for_half": enough}
