"""Evidence against a distribution, valid at any time: what fair bets on the draws would have won.

Somebody with a capital of 1 bets on each draw before it is seen. If draws follow the distribution, no way of betting
multiplies the capital by 1000 or more, at any time, with a chance above 1 in 1000 (Ville 1939; Ramdas et al. 2023,
"Game-theoretic statistics and safe anytime-valid inference"). So one may look after every draw, and stop when one
likes. A bet is a likelihood ratio: the chance of the draw as the bettor expects it, from earlier draws alone, by the
one that is tested. Several bettors share the capital equally.

Functions return logarithms of the factors by which draws multiply capitals, [b, n] of b bettors over n draws.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

from harness.results.statistics import Flags, Floats, Ints


class Learner(NamedTuple):
    """How a bettor learns from the draws that came.

    Attributes:
        concentration: draws that count for the distribution that is tested, added to those that came. Large numbers
            win more from small shifts, small ones learn large shifts sooner.
        share: of the capital, which is bet; with little of it, what was learned wrongly costs little.
    """

    concentration: float
    share: float = 1.0


LEARNERS = (Learner(10.0), Learner(100.0, 0.3), Learner(1000.0))
# The shares of draws that bettors on the support expect where there is no mass.
SHARES_OUTSIDE = (0.002, 0.01)


def bets_on_parts(
    parts: Sequence[int] | Ints,
    masses: Floats,
    keys: Sequence[Hashable],
    learners: Sequence[Learner],
    tolerated: Floats,
) -> Floats:
    """Bets on which of k parts each draw is in, by how often each came among the earlier draws with the same key.

    Args:
        parts: [n], from 0 to k - 1.
        masses: [n, k], of the parts in each draw's distribution; a draw from one without mass wins nothing.
        keys: [n].
        tolerated: [n, k], by how much each part's mass may be off at each draw.
    """
    num_parts = masses.shape[-1]
    factors = np.zeros((len(learners), len(parts)))
    places: dict[Hashable, list[int]] = defaultdict(list)
    for index, key in enumerate(keys):
        places[key].append(index)
    for at in places.values():
        mass = masses[at]
        drawn = np.eye(num_parts)[np.asarray(parts)[at]] * (mass > 0)
        before = drawn.cumsum(0) - drawn
        expected = mass.cumsum(0) - mass
        for row, (concentration, share) in zip(factors, learners, strict=True):
            prior = concentration / num_parts
            ratios = (before + prior) / (expected + prior)
            gains = share * (ratios / (ratios * mass).sum(-1, keepdims=True) - 1)
            allowance = np.log1p((np.abs(gains) * tolerated[at]).sum(-1))
            row[at] = np.log1p((gains * drawn).sum(-1)) - allowance
    return factors


def bets_on_outcomes(
    outcomes: Sequence[Hashable],
    masses: Floats,
    keys: Sequence[Hashable],
    learners: Sequence[Learner],
    tolerated: Floats,
) -> Floats:
    """Bets on which outcome comes, from the earlier draws with the same key, which have the same distribution.

    Args:
        outcomes: [n].
        masses: [n], of each outcome in its distribution; no bet stands where it is 0.
        keys: [n].
        tolerated: [n], the most of the distribution's mass that may be elsewhere.
    """
    import pandas as pd

    is_possible = masses > 0
    draws = pd.DataFrame({"key": keys, "outcome": outcomes, "mass": masses})[is_possible]
    # Earlier draws of this outcome and of all, and the largest number of one outcome over its mass.
    before = draws.groupby(["key", "outcome"]).cumcount()
    total = draws.groupby("key").cumcount()
    by_mass = (before + 1) / draws["mass"]
    peak = by_mass.groupby(draws["key"]).cummax().groupby(draws["key"]).shift(fill_value=0)
    factors = np.zeros((len(learners), len(outcomes)))
    for row, (concentration, share) in zip(factors, learners, strict=True):
        ratios = (before / draws["mass"] + concentration) / (total + concentration)
        gains = share * (ratios - 1)
        # From the outcome on which least is bet to the one on which most is.
        range_of_bets = share * tolerated[is_possible] * peak / (total + concentration)
        row[is_possible] = np.log1p(gains) - np.log1p(range_of_bets)
    return factors


def bets_on_support(is_outside: Flags, tolerated: Floats) -> Floats:
    """Bets that some draws have no mass in their distribution.

    Args:
        is_outside: [n], whether a draw has none.
        tolerated: [n], above 0, the most of the mass that may be there; a bettor whose share is no larger does not bet.
    """
    factors = np.zeros((len(SHARES_OUTSIDE), len(tolerated)))
    for row, share in zip(factors, SHARES_OUTSIDE, strict=True):
        most = np.minimum(tolerated, share)
        inside = np.log1p(-share) - np.log1p(-most)
        row[:] = np.where(is_outside, np.log(share / most), inside)
    return factors


def log_capital(bettors: Floats) -> Floats:
    """The logarithm of the capital [n] after each draw, of bettors [b, n] that share it equally."""
    return np.asarray(np.logaddexp.reduce(bettors.cumsum(-1)) - math.log(len(bettors)))


def learner_on_parts(num_parts: int, shift: float) -> Learner:
    """The learner that finds a shift between parts soonest, nearly: it expects as much spread as the shift has.

    Dirichlet shares of k equal parts, of concentration c, have a chi-squared distance of (k - 1) / c from equal ones in
    the mean, nearly. A shift with this total variation has at least (2 shift)^2.
    """
    return Learner((num_parts - 1) / (2 * shift) ** 2)


def power_on_parts(
    num_draws: Floats | int,
    shift: Floats | float,
    log_wanted: float,
    num_parts: int,
    concentration: float,
    tolerated: float = 0.0,
) -> Floats:
    """The chance, at least, that a bettor on parts (`bets_on_parts`) has won enough after the last draw.

    It holds for any shift between k parts with a total variation of d. Its chi-squared distance is at least 4 d^2, and
    as little where the mass of every part grows or falls by the same factor (Cauchy-Schwarz). So Pearson's X^2 of n
    draws is noncentral chi-squared with k - 1 degrees of freedom and at least 4 d^2 n. A bettor of concentration c wins
    X^2 / 2 * n / (n + c) - (k - 1) / 2 * log(1 + n / c), by Laplace's approximation of the Dirichlet-multinomial, and
    from unequal parts no less.

    Args:
        shift: total variation, in mass.
        log_wanted: the logarithm of what this bettor must win.
        tolerated: the total variation that rounding explains.
    """
    from scipy import stats

    learned = np.log1p(num_draws / concentration) * (num_parts - 1) / 2
    rounded = num_draws * np.log1p(4 * shift * tolerated)
    least = 2 * (1 + concentration / num_draws) * (log_wanted + learned + rounded)
    return np.asarray(stats.ncx2.sf(least, num_parts - 1, num_draws * (2 * shift) ** 2))
