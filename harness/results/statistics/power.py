"""How small a difference a measurement can show.

`latency` says so below its speed-up: 15 prompts can show a difference of 10 % (80 % power).
"""

from __future__ import annotations

import math

from harness.results.statistics.distributions import t_quantile, t_tail
from harness.results.statistics.interval import CONFIDENCE
from harness.results.statistics.runs import RatioEstimate

# How often a visible difference leads to an interval that excludes 1.
_POWER = 0.8


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
