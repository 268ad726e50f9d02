"""Evidence against a distribution, valid at any time: what fair bets on the draws would have won.

Somebody with a capital of 1 bets on each draw before it is seen. If draws follow the distribution, no way of betting
multiplies the capital by 1000 or more, at any time, with a chance above 1 in 1000 (Ville 1939; Ramdas et al. 2023,
"Game-theoretic statistics and safe anytime-valid inference"). So one may look after every draw, and stop when one
likes. A bet is a likelihood ratio: the chance of the draw as the bettor expects it, from earlier draws alone, by the
one that is tested. Several bettors share the capital equally.

Results are logarithms of these factors, [b, n] of b bettors over n draws, 0 where one does not bet.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

from harness.results.statistics.arrays import Flags, Floats


class Learner(NamedTuple):
    """How a bettor learns from the draws that came.

    Attributes:
        concentration: draws that count for the distribution that is tested, added to those that came. Large numbers
            win more from small shifts, small ones learn large shifts sooner.
        share: of the capital, which is bet; with little of it, what was learned wrongly costs little.
    """

    concentration: float
    share: float = 1.0


# Of two cells there is little to learn: by these `power_of_halves` is known exactly.
HALF_LEARNERS = (Learner(10.0), Learner(100.0), Learner(1000.0))
LEARNERS = (Learner(10.0), Learner(100.0, 0.3), Learner(300.0, 0.5), Learner(1000.0))
# The shares of draws that bettors on the support expect where there is no mass.
SHARES_OUTSIDE = (0.002, 0.01)
# The most draws that `draws_needed` tries.
_MOST_DRAWS = 4_000_000


def bets_on_cells(
    cells: Sequence[int] | Floats,
    num_cells: int,
    keys: Sequence[Hashable],
    learners: Sequence[Learner],
    tolerated: Floats,
) -> Floats:
    """Bets on which of equally likely cells each draw is in, from the earlier draws with the same key.

    Args:
        cells: [n], from 0 to `num_cells` - 1.
        keys: [n].
        tolerated: [n, num_cells], by how much each cell's mass may be off at each draw.
    """
    factors = np.zeros((len(learners), len(cells)))
    places: dict[Hashable, list[int]] = defaultdict(list)
    for index, key in enumerate(keys):
        places[key].append(index)
    for at in places.values():
        drawn = np.eye(num_cells)[np.asarray(cells)[at].astype(int)]
        before = drawn.cumsum(0) - drawn
        total = np.arange(len(at))[:, np.newaxis]
        for row, (concentration, share) in zip(factors, learners, strict=True):
            expected = (before + concentration / num_cells) / (total + concentration)
            won = share * (num_cells * expected - 1)
            lost = np.log1p((np.abs(won) * tolerated[at]).sum(-1))
            row[at] = np.log1p((won * drawn).sum(-1)) - lost
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
    # Draws so far of this outcome and of all, and the most of one outcome by its mass.
    before = draws.groupby(["key", "outcome"]).cumcount()
    total = draws.groupby("key").cumcount()
    by_mass = (before + 1) / draws["mass"]
    peak = by_mass.groupby(draws["key"]).cummax().groupby(draws["key"]).shift(fill_value=0)
    factors = np.zeros((len(learners), len(outcomes)))
    for row, (concentration, share) in zip(factors, learners, strict=True):
        expected = before / draws["mass"] + concentration
        won = share * (expected / (total + concentration) - 1)
        # From the outcome on which least is bet to the one on which most is.
        range_of_bets = share * tolerated[is_possible] * peak / (total + concentration)
        row[is_possible] = np.log1p(won) - np.log1p(range_of_bets)
    return factors


def bets_on_support(is_outside: Flags, tolerated: Floats) -> Floats:
    """Bets that some draws have no mass in their distribution.

    Args:
        is_outside: [n], whether a draw has none.
        tolerated: [n], the most of the mass that may be there; without a bet where this is as much.
    """
    factors = np.zeros((len(SHARES_OUTSIDE), len(tolerated)))
    for row, share in zip(factors, SHARES_OUTSIDE, strict=True):
        most = np.minimum(tolerated, share)
        inside = np.log1p(-share) - np.log1p(-most)
        row[:] = np.where(is_outside, np.log(share / most), inside)
    return factors


def evidence(bettors: Floats) -> Floats:
    """The logarithm of the capital [n] after each draw, of bettors [b, n] that share it equally."""
    return np.asarray(np.logaddexp.reduce(bettors.cumsum(-1)) - math.log(len(bettors)))


def power_of_halves(
    num_draws: int, shift: float, log_wanted: float, num_bettors: int, tolerated: float = 0.0
) -> float:
    """The chance that draws with `shift` more in one of two halves yield enough evidence by their end.

    That is by those bettors alone who bet on halves (`bets_on_cells`, two cells): the others add to it.

    Args:
        shift: of the mass, in total variation.
        log_wanted: the logarithm of the evidence that is enough.
        num_bettors: that share the capital.
        tolerated: by how much the mass of both halves together may be off.
    """
    from scipy import special, stats

    lost = num_draws * math.log1p(2 * shift * tolerated)

    def is_enough(num_in_half: int) -> bool:
        won = [
            special.betaln(num_in_half + each / 2, num_draws - num_in_half + each / 2)
            - special.betaln(each / 2, each / 2)
            for each, _ in HALF_LEARNERS
        ]
        capital = np.logaddexp.reduce(won) + num_draws * math.log(2) - math.log(num_bettors)
        return bool(capital - lost >= log_wanted)

    numbers = range(num_draws // 2, num_draws + 1)
    fewest = numbers.start + bisect_left(numbers, True, key=is_enough)
    return float(stats.binom.sf(fewest - 1, num_draws, min(1.0, 0.5 + shift)))


def draws_needed(
    shift: float, log_wanted: float, num_bettors: int, power: float, tolerated: float = 0.0
) -> int | None:
    """The fewest draws, nearly, with which `power_of_halves` is enough; None where no number is."""
    number = 10
    while number <= _MOST_DRAWS:
        if power_of_halves(number, shift, log_wanted, num_bettors, tolerated) >= power:
            return number
        number = math.ceil(1.03 * number)
    return None


def visible_shift(
    num_draws: int, log_wanted: float, num_bettors: int, power: float, tolerated: float = 0.0
) -> float | None:
    """The smallest shift, to a thousandth, for which `power_of_halves` is enough; None where none up to a half is."""

    def is_visible(thousandths: int) -> bool:
        shift = thousandths / 1000
        return power_of_halves(num_draws, shift, log_wanted, num_bettors, tolerated) >= power

    if not is_visible(500):
        return None
    smallest = 1 + bisect_left(range(1, 500), True, key=is_visible)
    return smallest / 1000
