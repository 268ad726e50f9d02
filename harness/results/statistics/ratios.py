"""Ratios of totals, such as a speed-up, with their intervals."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from harness.results.statistics.interval import FEWEST_FOR_INTERVAL, NAN, Interval

# Resampled values held in memory at once, so that a bootstrap over thousands of prompts stays
# under about 100 MB.
_RESAMPLED_VALUES_AT_ONCE = 2_000_000


def ratio_of_totals(
    numerators: ArrayLike,
    denominators: ArrayLike,
    num_resamples: int,
    seed: int,
    confidence: float = 0.95,
) -> Interval:
    """sum(numerators) / sum(denominators) with a bootstrap interval, as of the times of both arms on each prompt.

    A resample draws prompts, so that a hard prompt affects both arms alike. The interval is the percentile interval
    with Hesterberg's small-sample expansion ("What Teachers Should Know about the Bootstrap", 2015): its levels are
    widened until the interval of a mean would match Student's t. In simulations with 15 prompts it covered the truth
    in 92 to 93 % of the cases, plain percentile and BCa intervals in 89 to 91 %.

    Args:
        numerators: [num_prompts], such as ms of the regular arm.
        denominators: [num_prompts], positive, such as ms of the speculative arm.

    Returns:
        The ratio and its bounds; bounds are nan below `FEWEST_FOR_INTERVAL` prompts, everything is nan with none.

    Raises:
        ValueError: when the two differ in length or a denominator is not positive.
    """
    tops, bottoms = (
        np.asarray(numerators, dtype=np.float64),
        np.asarray(denominators, dtype=np.float64),
    )
    if tops.ndim != 1 or tops.shape != bottoms.shape:
        raise ValueError(
            f"numerators {tops.shape} and denominators {bottoms.shape} must be two lists of one length"
        )
    if not (bottoms > 0).all():
        raise ValueError("every denominator must be positive")
    if tops.size < FEWEST_FOR_INTERVAL:
        return Interval(float(tops.sum() / bottoms.sum()) if tops.size else NAN)
    # The percentile interval's level whose normal quantile is Student's, times √(n / (n − 1)).
    quantile = stats.t.isf((1 - confidence) / 2, tops.size - 1) * math.sqrt(
        tops.size / (tops.size - 1)
    )
    bounds = stats.bootstrap(
        (tops, bottoms),
        lambda tops, bottoms, axis: tops.sum(axis=axis) / bottoms.sum(axis=axis),
        paired=True,
        vectorized=True,
        method="percentile",
        n_resamples=num_resamples,
        batch=max(1, _RESAMPLED_VALUES_AT_ONCE // tops.size),
        confidence_level=float(1 - 2 * stats.norm.sf(quantile)),
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return Interval(float(tops.sum() / bottoms.sum()), float(bounds.low), float(bounds.high))
