"""Evidence against a distribution that is valid at any time: the winnings of fair bets on the draws.

A bettor with a capital of 1 bets on each draw before it is seen. If the draws follow the distribution, no way of
betting multiplies the capital by 1000 or more, at any time, with a chance above 1 in 1000 (Ville 1939; Ramdas et al.
2023, "Game-theoretic statistics and safe anytime-valid inference"). So one may look after every draw, and stop at will.
A bet multiplies the capital by a likelihood ratio: the probability of the draw that the bettor expects, from earlier
draws alone, divided by the probability under the distribution that is tested. Several bettors share the capital
equally.

For b bettors and n draws, the functions return [b, n]: the logarithm of the factor by which each draw multiplies each
bettor's capital.
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
        concentration: how many draws the tested distribution counts for, next to the earlier draws. A large number wins
            more from small shifts; a small one learns large shifts sooner.
        share: the share of the capital that is bet. If it is small, wrong beliefs cost little.
    """

    concentration: float
    share: float = 1.0


# Small, medium and large concentrations together, because the size of a shift is not known beforehand.
LEARNERS = (Learner(10.0), Learner(100.0, 0.3), Learner(1000.0))
# Bettors on the support expect these shares of draws where the distribution has no mass.
SHARES_OUTSIDE = (0.002, 0.01)


def bets_on_parts(
    parts: Sequence[int] | Ints,
    masses: Floats,
    keys: Sequence[Hashable],
    learners: Sequence[Learner],
    tolerated: Floats,
) -> Floats:
    """Bets on which of k parts each draw is in, from how often each part came among earlier draws with the same key.

    For example, with two parts of mass 0.5, a concentration of 2 and no tolerance, two draws from part 0 multiply the
    capital by 1 and then by 4/3: the bettor expects part 0 with (1 + 1) / (0.5 + 1) = 4/3 times its mass.

    Args:
        parts: [n], each from 0 to k - 1.
        masses: [n, k], the mass of each part in the distribution of each draw. A draw from a part without mass wins
            nothing.
        keys: [n]; the bettors learn separately for each key.
        tolerated: [n, k], by how much the mass of each part may be wrong at each draw.
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
    """Bets on which outcome each draw has, from earlier draws with the same key.

    Args:
        outcomes: [n].
        masses: [n], the mass of each draw's outcome in its distribution; nothing is bet where it is 0.
        keys: [n]; draws with the same key have the same distribution.
        tolerated: [n], the most mass of each distribution that may belong to other outcomes.
    """
    import pandas as pd

    is_possible = masses > 0
    draws = pd.DataFrame({"key": keys, "outcome": outcomes, "mass": masses})[is_possible]
    # Earlier draws of the same outcome, all earlier draws, and the largest count so far of any outcome over its mass.
    before = draws.groupby(["key", "outcome"]).cumcount()
    total = draws.groupby("key").cumcount()
    by_mass = (before + 1) / draws["mass"]
    peak = by_mass.groupby(draws["key"]).cummax().groupby(draws["key"]).shift(fill_value=0)
    factors = np.zeros((len(learners), len(outcomes)))
    for row, (concentration, share) in zip(factors, learners, strict=True):
        ratios = (before / draws["mass"] + concentration) / (total + concentration)
        gains = share * (ratios - 1)
        # The distance from the outcome with the smallest bet to the one with the largest.
        range_of_bets = share * tolerated[is_possible] * peak / (total + concentration)
        row[is_possible] = np.log1p(gains) - np.log1p(range_of_bets)
    return factors


def bets_on_support(is_outside: Flags, tolerated: Floats) -> Floats:
    """Bets that some draws have no mass in their distribution.

    Args:
        is_outside: [n], whether the draw has no mass.
        tolerated: [n], above 0, the most mass that may lie there. A bettor who expects no larger share does not bet.
    """
    factors = np.zeros((len(SHARES_OUTSIDE), len(tolerated)))
    for row, share in zip(factors, SHARES_OUTSIDE, strict=True):
        most = np.minimum(tolerated, share)
        inside = np.log1p(-share) - np.log1p(-most)
        row[:] = np.where(is_outside, np.log(share / most), inside)
    return factors


def log_capital(bettors: Floats) -> Floats:
    """The logarithm of the capital [n] after each draw, shared equally by bettors [b, n]."""
    return np.asarray(np.logaddexp.reduce(bettors.cumsum(-1)) - math.log(len(bettors)))


def learner_on_parts(num_parts: int, shift: float) -> Learner:
    """The learner that finds a shift between equal parts about the soonest: it expects as much spread as the shift has.

    Dirichlet shares of k equal parts with concentration c have a mean chi-squared distance from equal shares of nearly
    (k - 1) / c. A shift with total variation `shift` has a distance of at least (2 shift)^2.
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
    """A lower bound of the chance that a bettor on parts (`bets_on_parts`) has won enough after the last draw.

    It holds for any shift between the k parts with total variation d. The chi-squared distance of such a shift is at
    least 4 d^2, and exactly that if the mass of every part grows or falls by the same factor (Cauchy-Schwarz). So
    Pearson's X^2 of n draws is noncentral chi-squared with k - 1 degrees of freedom and a noncentrality of at least
    4 d^2 n. A bettor of concentration c wins X^2 / 2 * n / (n + c) - (k - 1) / 2 * log(1 + n / c), by Laplace's
    approximation of the Dirichlet-multinomial, and no less from unequal parts.

    Args:
        num_draws: n; an array gives an array of chances.
        shift: d, the total variation in mass.
        log_wanted: the logarithm of the amount that this bettor must win.
        num_parts: k.
        concentration: c.
        tolerated: the total variation that rounding explains.
    """
    from scipy import stats

    learned = np.log1p(num_draws / concentration) * (num_parts - 1) / 2
    rounded = num_draws * np.log1p(4 * shift * tolerated)
    least = 2 * (1 + concentration / num_draws) * (log_wanted + learned + rounded)
    return np.asarray(stats.ncx2.sf(least, num_parts - 1, num_draws * (2 * shift) ** 2))
