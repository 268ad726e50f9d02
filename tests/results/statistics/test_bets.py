"""Bets are fair, win what published distributions say, accuse no honest stream, and have the power that is stated."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from harness.results.statistics.bets import (
    HALF_LEARNERS,
    LEARNERS,
    Learner,
    bets_on_cells,
    bets_on_outcomes,
    draws_needed,
    evidence,
    power_of_halves,
    visible_shift,
)


@pytest.mark.parametrize("concentration", [10.0, 1000.0])
def test_what_is_won_on_cells_is_the_dirichlet_multinomial_likelihood_ratio(
    concentration: float,
) -> None:
    cells = [0, 2, 2, 1, 2, 2, 0, 2]
    won = bets_on_cells(cells, 3, [None] * 8, [Learner(concentration)], np.zeros((8, 3))).sum()
    counts = np.bincount(cells, minlength=3)
    learned = stats.dirichlet_multinomial.logpmf(counts, np.full(3, concentration / 3), len(cells))
    tested = stats.multinomial.logpmf(counts, len(cells), np.full(3, 1 / 3))
    assert won == pytest.approx(learned - tested)


def test_what_is_won_on_outcomes_is_so_too_and_in_each_context_by_itself() -> None:
    masses = np.array([0.5, 0.3, 0.2])
    outcomes = [0, 1, 1, 0, 2, 1, 1, 1]
    keys = [(number % 2,) for number in range(len(outcomes))]
    won = bets_on_outcomes(outcomes, masses[outcomes], keys, [Learner(10.0)], np.zeros(8)).sum()
    expected = 0.0
    for first in (0, 1):
        counts = np.bincount(outcomes[first::2], minlength=3)
        learned = stats.dirichlet_multinomial.logpmf(counts, 10 * masses, 4)
        expected += learned - stats.multinomial.logpmf(counts, 4, masses)
    assert won == pytest.approx(expected)


@pytest.mark.parametrize("learner", LEARNERS)
def test_every_bet_is_fair(learner: Learner) -> None:
    """Over all streams of four draws, weighted by their chances, a capital of 1 stays 1."""
    masses = np.array([0.5, 0.3, 0.2])
    on_cells = on_outcomes = 0.0
    for stream in itertools.product(range(3), repeat=4):
        draws = list(stream)
        won = bets_on_cells(draws, 3, [None] * 4, [learner], np.zeros((4, 3))).sum()
        on_cells += math.exp(won) / 3**4
        won = bets_on_outcomes(draws, masses[draws], ["same"] * 4, [learner], np.zeros(4)).sum()
        on_outcomes += math.exp(won) * masses[draws].prod()
    assert [on_cells, on_outcomes] == pytest.approx([1.0, 1.0])


@pytest.mark.parametrize("learner", LEARNERS)
def test_what_rounding_may_move_wins_nothing(learner: Learner) -> None:
    """In expectation over the distribution that favours the bettor most, a capital does not grow."""
    before = [0] * 30
    off = 0.02
    tolerated = np.tile([off, off], (31, 1))
    last = [
        bets_on_cells([*before, cell], 2, [None] * 31, [learner], tolerated)[0, -1]
        for cell in range(2)
    ]
    assert (0.5 + off) * math.exp(last[0]) + (0.5 - off) * math.exp(last[1]) == pytest.approx(1.0)
    masses = np.full(31, 0.5)
    of_outcomes = [
        bets_on_outcomes([*before, outcome], masses, ["same"] * 31, [learner], np.full(31, off))[
            0, -1
        ]
        for outcome in range(2)
    ]
    expected = (0.5 + off) * math.exp(of_outcomes[0]) + (0.5 - off) * math.exp(of_outcomes[1])
    assert expected == pytest.approx(1.0)


def test_the_capital_is_shared_equally() -> None:
    bettors = np.log([[2.0, 3.0], [1.0, 0.5]])
    assert np.exp(evidence(bettors)) == pytest.approx([(2 + 1) / 2, (2 * 3 + 1 * 0.5) / 2])


def test_as_many_draws_are_needed_as_have_the_power() -> None:
    wanted = math.log(1e6)
    number = draws_needed(0.1, wanted, 12, 0.99)
    assert number is not None
    assert power_of_halves(number, 0.1, wanted, 12) >= 0.99
    assert power_of_halves(int(0.9 * number), 0.1, wanted, 12) < 0.99
    assert draws_needed(1e-6, wanted, 12, 0.99) is None
    with_rounding = draws_needed(0.1, wanted, 12, 0.99, tolerated=0.02)
    assert with_rounding is not None
    assert power_of_halves(with_rounding, 0.1, wanted, 12, tolerated=0.02) >= 0.99
    # The other way round, to a thousandth.
    assert visible_shift(number, wanted, 12, 0.99) == 0.1
    assert visible_shift(5, wanted, 12, 0.99) is None


@pytest.mark.parametrize("num_draws", range(290, 300))
def test_the_power_is_the_mass_of_all_counts_with_enough_evidence(num_draws: int) -> None:
    """By scipy's likelihoods of each count; three of twelve bettors bet on halves, and each draw has its price."""
    wanted, tolerated = math.log(1000), 0.05
    counts = np.arange(num_draws // 2, num_draws + 1)
    fair = stats.binom.logpmf(counts, num_draws, 0.5)
    won = [
        stats.betabinom.logpmf(counts, num_draws, each / 2, each / 2) - fair
        for each, _ in HALF_LEARNERS
    ]
    capital = np.logaddexp.reduce(won) - math.log(12)
    for shift in (0.05, 0.1, 0.15):
        # What is bet on a draw is 1 + 2 shift to 1 - 2 shift.
        enough = capital - num_draws * math.log1p(2 * shift * tolerated) >= wanted
        expected = stats.binom.pmf(counts[enough], num_draws, 0.5 + shift).sum()
        found = power_of_halves(num_draws, shift, wanted, 12, tolerated)
        assert found == pytest.approx(expected)
