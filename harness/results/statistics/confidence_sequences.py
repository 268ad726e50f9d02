"""Bounds on tokens per iteration that hold at every look, however often and whenever one looks.

They invert a test by betting (Waudby-Smith and Ramdas 2024, Estimating means of bounded random variables by betting,
JRSS B, arXiv:2010.09686). Where m is the true ratio of tokens to iterations, tokens - m iterations is 0 on average over
units, and nobody who bets on its sign expects to gain. The capital of such bets, one unit after the other, is a
nonnegative martingale, which ever reaches 1 / alpha with a chance of at most alpha (Ville 1939). So every m against
which bets have won that much is refuted, at any number of units, and without assuming a shape of the distribution.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

from harness.results.statistics.arrays import Floats, positive_tables
from harness.results.statistics.interval import CONFIDENCE, Coverage, Interval

# A bet stakes a share of the most that can never be lost altogether. Several gamblers keep a share each, and their mean
# capital counts, so that the order of the units does not matter ("dKelly" in the paper).
_SHARES = np.linspace(0.02, 0.98, 25)[:, np.newaxis]
_BISECTIONS = 30


def anytime_tokens_per_iteration(
    tokens: ArrayLike,
    iterations: ArrayLike,
    num_draft_tokens: int,
    alpha: float = 1 - CONFIDENCE,
) -> Interval:
    """Tokens per iteration, all units together, with bounds that hold for every number of units at once.

    An iteration decides 1 to K + 1 tokens. The method needs a longest unit too, and takes the longest that was seen:
    `benchmarks/drift_coverage.py` has what the bounds cover then.

    Args:
        tokens: [num_units], of all texts of a prompt.
        iterations: [num_units], expected or counted, that decided them.
        num_draft_tokens: K.
        alpha: the chance that a bound is ever wrong.

    Raises:
        ValueError: for shapes that differ, no units, and numbers that are not positive.
    """
    # A table of one line each.
    tops, bottoms = positive_tables(np.atleast_2d(tokens), np.atleast_2d(iterations), "[num_units]")
    of_unit, iterations_of_unit = tops[0], bottoms[0]
    most = num_draft_tokens + 1
    longest = of_unit.max()

    def refuted_from_below(m: float) -> bool:
        surplus = of_unit - m * iterations_of_unit
        return _log_capital(surplus / ((m - 1) * longest)) >= math.log(2 / alpha)

    def refuted_from_above(m: float) -> bool:
        surplus = m * iterations_of_unit - of_unit
        return _log_capital(surplus / ((1 - m / most) * longest)) >= math.log(2 / alpha)

    # Expected iterations are rounded in files.
    estimate = float(np.clip(of_unit.sum() / iterations_of_unit.sum(), 1, most))
    low = _boundary(refuted_from_below, 1, estimate)
    high = _boundary(refuted_from_above, most, estimate)
    return Interval(estimate, low, high, Coverage(len(of_unit), "prompt"))


def _log_capital(gains: Floats) -> float:
    """Log of the mean capital of all gamblers.

    Args:
        gains: [num_units], of a gambler who stakes all: at least -1.
    """
    log_capitals = np.log1p(_SHARES * gains).sum(axis=1)
    return float(np.logaddexp.reduce(log_capitals)) - math.log(len(_SHARES))


def _boundary(is_refuted: Callable[[float], bool], end: float, estimate: float) -> float:
    """The value nearest to the estimate that is refuted; `end` where none is."""
    if math.isclose(end, estimate):
        return end
    refuted, open_ = end, estimate
    for _ in range(_BISECTIONS):
        middle = (refuted + open_) / 2
        if is_refuted(middle):
            refuted = middle
        else:
            open_ = middle
    return refuted
