"""Tests by fair bets whether draws follow a distribution; the evidence is valid at any time.

A bettor with a capital of 1 bets on each draw before seeing it. If the draws follow the tested distribution, then for
any way of betting, the probability that the capital ever reaches 1000 is at most 1 in 1000 (Ville 1939; Ramdas et al.
2023, "Game-theoretic statistics and safe anytime-valid inference"). So a test may look at the capital after every draw,
and may stop at any time.

A bet multiplies the capital by a likelihood ratio: the probability that the bettor expected for the draw, divided by
the draw's probability under the tested distribution. The bettor's expectation comes from earlier draws only. Several
bettors share the capital equally.

For b bettors and n draws, the functions named `bets_on_…` return an array [b, n]. It contains the logarithms of the
factors by which each draw multiplies each bettor's capital.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

from harness.results.statistics import Flags, Floats, Ints


class Learner(NamedTuple):
    """How a bettor learns from earlier draws.

    Attributes:
        concentration: weight of the tested distribution in the bettor's expectation, as a number of draws; each earlier
            draw has weight 1. With a large concentration, a bettor wins more if the shift is small; with a small one,
            it learns a large shift sooner.
        share: the share of the capital that is bet on each draw, at most 1. The smaller it is, the less a wrong
            expectation costs.
    """

    concentration: float
    share: float = 1.0


# The bettors on tokens. Their concentrations differ because the size of a shift is not known beforehand. The middle
# bettor stakes only 30 % of its capital, as a hedge: it loses little while its expectation is wrong. No measurement of
# these values is recorded. The test is valid for any values; they determine only how soon a shift is found.
LEARNERS = (Learner(10.0), Learner(100.0, 0.3), Learner(1000.0))
# Each bettor on the support expects one of these shares of draws to have no mass in their distribution: the first finds
# small faults, the second finds large faults sooner. Like `LEARNERS`, they affect only the power.
SHARES_OUTSIDE = (0.002, 0.01)


def bets_on_parts(
    parts: Sequence[int] | Ints,
    masses: Floats,
    keys: Sequence[Hashable],
    learners: Sequence[Learner],
    tolerated: Floats,
) -> Floats:
    """Bets on which of k parts contains each draw. The bettors expect the parts as often as they occurred among earlier
    draws with the same key.

    For example, there are two parts of mass 0.5, the concentration is 2, and nothing is tolerated. Two draws from part
    0 then multiply the capital by 1 and by 4/3: before the second draw, the bettor expects part 0 with 4/3 of its mass,
    because (1 + 1) / (0.5 + 1) = 4/3.

    Args:
        parts: [n], the part of each draw, from 0 to k - 1.
        masses: [n, k], the mass of each part in the distribution of each draw. A draw from a part without mass wins
            nothing; `bets_on_support` bets on such draws.
        keys: [n]; the bettors learn separately for each key.
        tolerated: [n, k], by how much the mass of each part may be wrong at each draw. The most that such an error
            could win is subtracted.
    """
    num_parts = masses.shape[-1]
    factors = np.zeros((len(learners), len(parts)))
    places: dict[Hashable, list[int]] = defaultdict(list)
    for index, key in enumerate(keys):
        places[key].append(index)
    for at in places.values():
        mass = masses[at]
        # For each draw with this key, and each part: whether the draw is from the part; how many earlier draws were
        # (`before`); and how many were to be expected.
        drawn = np.eye(num_parts)[np.asarray(parts)[at]] * (mass > 0)
        before = drawn.cumsum(0) - drawn
        expected = mass.cumsum(0) - mass
        for row, (concentration, share) in zip(factors, learners, strict=True):
            prior = concentration / num_parts
            ratios = (before + prior) / (expected + prior)
            # Divided so that the masses that the bettor expects sum to 1.
            gains = share * (ratios / (ratios * mass).sum(-1, keepdims=True) - 1)
            # The most that the bets gain on average if the mass of every part is wrong by as much as is tolerated.
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
    """Bets on which outcome each draw has. The bettors expect outcomes as often as these occurred among earlier draws
    with the same key.

    For example, the concentration is 2, and nothing is tolerated. Two draws with the same key and the same outcome of
    mass 0.5 multiply the capital by 1 and by 4/3: before the second draw, the bettor expects this outcome with 4/3 of
    its mass, because (1 / 0.5 + 2) / (1 + 2) = 4/3.

    Args:
        outcomes: [n], the outcome of each draw.
        masses: [n], the mass of each draw's outcome in the draw's distribution; nothing is bet if it is 0.
        keys: [n]; draws with the same key have the same distribution, and bettors learn separately for each key.
        tolerated: [n], the most mass of each distribution that may belong to other outcomes.
    """
    import pandas as pd

    is_possible = masses > 0
    draws = pd.DataFrame({"key": keys, "outcome": outcomes, "mass": masses})[is_possible]
    # For each draw, among earlier draws with the same key: `before` counts draws of the same outcome, `total` counts
    # all, and `peak` is the largest ratio that any outcome had of its count to its mass.
    before = draws.groupby(["key", "outcome"]).cumcount()
    total = draws.groupby("key").cumcount()
    by_mass = (before + 1) / draws["mass"]
    peak = by_mass.groupby(draws["key"]).cummax().groupby(draws["key"]).shift(fill_value=0)
    factors = np.zeros((len(learners), len(outcomes)))
    for row, (concentration, share) in zip(factors, learners, strict=True):
        ratios = (before / draws["mass"] + concentration) / (total + concentration)
        gains = share * (ratios - 1)
        # The largest bet is on the outcome of `peak`, and the smallest on an outcome that was not drawn yet. Their
        # difference, times the tolerated mass, is the most that a bettor gains if that mass belongs to other outcomes.
        range_of_bets = share * tolerated[is_possible] * peak / (total + concentration)
        row[is_possible] = np.log1p(gains) - np.log1p(range_of_bets)
    return factors


def bets_on_support(is_outside: Flags, tolerated: Floats) -> Floats:
    """Bets that some draws have an outcome without mass in their distribution.

    Args:
        is_outside: [n], whether the draw's outcome has no mass. Such a draw multiplies the capital of the bettor on the
            share s by s / tolerated, and every other draw by (1 - s) / (1 - tolerated).
        tolerated: [n], positive: the most mass that such outcomes may have after all. A bettor that expects no larger
            share does not bet.
    """
    factors = np.zeros((len(SHARES_OUTSIDE), len(tolerated)))
    for row, share in zip(factors, SHARES_OUTSIDE, strict=True):
        most = np.minimum(tolerated, share)
        inside = np.log1p(-share) - np.log1p(-most)
        row[:] = np.where(is_outside, np.log(share / most), inside)
    return factors


def log_capital(bettors: Floats) -> Floats:
    """The logarithm [n] of the capital after each draw, if bettors [b, n] began with equal shares of a capital of 1."""
    return np.asarray(np.logaddexp.reduce(bettors.cumsum(-1)) - math.log(len(bettors)))


def learner_on_parts(num_parts: int, shift: float) -> Learner:
    """The learner that finds a shift between k equal parts about as soon as possible, because it expects shifts of that
    size.

    Random shares of k parts from a Dirichlet distribution with concentration c have a mean chi-squared distance from
    equal shares of nearly (k - 1) / c. A shift of total variation `shift` has a distance of at least (2 shift)^2. The
    learner's c makes the two equal.
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
    """A lower bound of the probability that a bettor on parts (`bets_on_parts`) has won enough after the last draw.

    It holds for any shift between the k parts with total variation d. Steps 2 and 3 are approximations; simulations
    confirm the bound (`tests/results/statistics/test_bets.py`).

    1. The chi-squared distance of the shift is at least 4 d^2 (Cauchy-Schwarz). It is exactly 4 d^2 if the mass of
       every part is multiplied by 1 + 2 d or by 1 - 2 d.
    2. So Pearson's X^2 of n draws is about noncentral chi-squared, with k - 1 degrees of freedom and a noncentrality of
       at least 4 d^2 n.
    3. By Laplace's approximation of the Dirichlet-multinomial distribution, a bettor of concentration c wins
       X^2 / 2 * n / (n + c) - (k - 1) / 2 * log(1 + n / c), and at least as much if the parts are unequal.
    4. A tolerance of total variation T costs log(1 + 4 d T) for each draw: the bets are 2 d or -2 d, and the tolerated
       masses of all parts sum to 2 T.

    Args:
        num_draws: n; for an array, the result is an array of probabilities.
        shift: d, the total variation in mass.
        log_wanted: the logarithm of the amount that this bettor must win.
        num_parts: k.
        concentration: c.
        tolerated: T, the total variation that rounding explains.
    """
    from scipy import stats

    learned = np.log1p(num_draws / concentration) * (num_parts - 1) / 2
    rounded = num_draws * np.log1p(4 * shift * tolerated)
    least = 2 * (1 + concentration / num_draws) * (log_wanted + learned + rounded)
    return np.asarray(stats.ncx2.sf(least, num_parts - 1, num_draws * (2 * shift) ** 2))
