"""Bets are fair, win what published distributions say, accuse no honest stream, and have the power that is stated."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from harness.results.statistics.bets import (
    LEARNERS,
    Learner,
    bets_on_outcomes,
    bets_on_parts,
    learner_on_parts,
    log_capital,
    power_on_parts,
)


@pytest.mark.parametrize("concentration", [10.0, 1000.0])
def test_what_is_won_on_parts_is_the_dirichlet_multinomial_likelihood_ratio(
    concentration: float,
) -> None:
    parts, even = [0, 2, 2, 1, 2, 2, 0, 2], np.full((8, 3), 1 / 3)
    won = bets_on_parts(parts, even, [None] * 8, [Learner(concentration)], np.zeros((8, 3))).sum()
    counts = np.bincount(parts, minlength=3)
    learned = stats.dirichlet_multinomial.logpmf(counts, np.full(3, concentration / 3), len(parts))
    tested = stats.multinomial.logpmf(counts, len(parts), even[0])
    assert won == pytest.approx(learned - tested)


@pytest.mark.parametrize("learner", LEARNERS)
def test_every_bet_is_fair(learner: Learner) -> None:
    """Over all streams of four draws, weighted by their chances, a capital of 1 stays 1."""
    masses = np.array([0.5, 0.3, 0.2])
    # Parts have other masses in each distribution, and sometimes none.
    uneven = np.array([[0.1, 0.3, 0.6], [0.5, 0.0, 0.5], [0.2, 0.2, 0.6], [0.9, 0.1, 0.0]])
    on_parts = on_outcomes = 0.0
    for stream in itertools.product(range(3), repeat=4):
        draws = list(stream)
        won = bets_on_parts(draws, uneven, [None] * 4, [learner], np.zeros((4, 3))).sum()
        on_parts += math.exp(won) * uneven[range(4), draws].prod()
        won = bets_on_outcomes(draws, masses[draws], ["same"] * 4, [learner], np.zeros(4)).sum()
        on_outcomes += math.exp(won) * masses[draws].prod()
    assert [on_parts, on_outcomes] == pytest.approx([1.0, 1.0])


@pytest.mark.parametrize("learner", LEARNERS)
def test_what_rounding_may_move_wins_nothing(learner: Learner) -> None:
    """In expectation over the distribution that favours the bettor most, a capital does not grow."""
    before = [0] * 30
    off = 0.02
    tolerated = np.tile([off, off], (31, 1))
    even, known = np.full((31, 2), 0.5), [None] * 31
    won = [bets_on_parts([*before, part], even, known, [learner], tolerated) for part in range(2)]
    last = [each[0, -1] for each in won]
    assert (0.5 + off) * math.exp(last[0]) + (0.5 - off) * math.exp(last[1]) == pytest.approx(1.0)
    masses = np.full(31, 0.5)
    same, moved = ["same"] * 31, np.full(31, off)
    won = [bets_on_outcomes([*before, each], masses, same, [learner], moved) for each in range(2)]
    of_outcomes = [each[0, -1] for each in won]
    expected = (0.5 + off) * math.exp(of_outcomes[0]) + (0.5 - off) * math.exp(of_outcomes[1])
    assert expected == pytest.approx(1.0)


def test_the_capital_is_shared_equally() -> None:
    bettors = np.log([[2.0, 3.0], [1.0, 0.5]])
    assert np.exp(log_capital(bettors)) == pytest.approx([(2 + 1) / 2, (2 * 3 + 1 * 0.5) / 2])


@pytest.mark.parametrize("num_parts", [2, 16])
@pytest.mark.parametrize(("shift", "num_draws"), [(0.05, 7000), (0.05, 10_000), (0.2, 600)])
def test_no_shift_between_parts_is_seen_less_often_than_the_power_says(
    num_parts: int, shift: float, num_draws: int
) -> None:
    """Of 20,000 streams each, with exact likelihoods by scipy. Where all parts move alike it is nearly the power."""
    wanted, (concentration, _) = math.log(1e9), learner_on_parts(num_parts, shift)
    power = power_on_parts(num_draws, shift, wanted, num_parts, concentration)
    alike = np.where(np.arange(num_parts) % 2, -1.0, 1.0)
    one_up = np.append(num_parts - 1.0, np.full(num_parts - 1, -1.0))
    generator = np.random.default_rng(0)
    for moved in (alike, one_up):
        masses = 1 / num_parts + 2 * shift * moved / np.abs(moved).sum()
        counts = generator.multinomial(num_draws, masses, size=20_000)
        prior = np.full(num_parts, concentration / num_parts)
        won = stats.dirichlet_multinomial.logpmf(counts, prior, num_draws)
        won -= stats.multinomial.logpmf(counts, num_draws, np.full(num_parts, 1 / num_parts))
        seen = float((won >= wanted).mean())
        assert seen > power - 6 * 0.5 / math.sqrt(20_000)
        if moved is alike:
            assert seen < power + 0.12
